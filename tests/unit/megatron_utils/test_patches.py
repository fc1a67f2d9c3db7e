"""The rewriting of megatron.core for cpu, and repairs that would otherwise fail silently."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.patches import cpu_import
from slime.backends.megatron_utils.patches.install import install
from tests.unit.megatron_utils.operators import Operators
from tests.unit.megatron_utils.tiny_trainer import single_rank


def _rewritten(source: str) -> str:
    return ast.unparse(ast.fix_missing_locations(cpu_import._Rewrite().visit(ast.parse(source))))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ("x.type() == 'torch.cuda.FloatTensor'", "x.type() == 'torch.FloatTensor'"),
        ("y = x.cuda(non_blocking=True)", "y = x"),
        ("torch.empty(2, pin_memory=True)", "torch.empty(2)"),
        ("from torch.cuda import Stream", "from slime_megatron_cpu_cuda import Stream"),
        ("f'cuda {x}'", "f'cuda {x}'"),
        ("x = 'cuda graphs'", "x = 'cuda graphs'"),
    ],
)
def test_each_use_of_cuda_is_rewritten(source: str, expected: str) -> None:
    assert _rewritten(source) == expected


def test_the_stand_in_is_imported_behind_docstring_and_future_imports() -> None:
    lines = _rewritten("'doc'\nfrom __future__ import annotations\nd = torch.cuda.current_device()").splitlines()
    assert lines[1:] == [
        "from __future__ import annotations",
        "import slime_megatron_cpu_cuda as _slime_cuda",
        "d = _slime_cuda.current_device()",
    ]


def test_torch_itself_stays_as_it_is() -> None:
    compile_function, zeros = torch.compile, torch.zeros
    install()
    assert (torch.compile, torch.zeros) == (compile_function, zeros)
    assert not torch.cuda.is_available() or torch.cuda.device_count() > 0
    with torch.device("meta"):
        assert torch.zeros(1).is_meta


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_installing_too_late_is_an_error() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core'); "
        "from slime.backends.megatron_utils.patches import cpu_import; cpu_import.install()"
    )
    assert "megatron.core was imported before the CPU rewriting" in _python(code).stderr


def test_a_package_that_has_replaced_the_loader_of_source_files_does_not_prevent_the_rewriting() -> None:
    """As beartype does, which fastmcp imports, and with it OpenEnv."""
    code = (
        "import sys\n"
        "from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder\n"
        "from slime.backends.megatron_utils.patches import cpu_import\n"
        "class Other(cpu_import.importlib.machinery.SourceFileLoader): pass\n"
        "loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (Other, SOURCE_SUFFIXES)\n"
        "sys.path_hooks.insert(0, FileFinder.path_hook(*loaders))\n"
        "sys.path_importer_cache.clear()\n"
        "cpu_import.install()\n"
        "import megatron.core.jit as other\n"
        "assert type(other.__loader__) is cpu_import._Loader, other.__loader__\n"
    )
    result = _python(code)
    assert result.returncode == 0, result.stderr


def test_an_import_without_a_writable_cache_and_without_heavy_packages_works(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file instead of a directory: fails for root as well
    code = (
        "import sys\n"
        "from slime.backends.megatron_utils.patches.install import install\n"
        "install(); install()\n"
        "from megatron.core.tensor_parallel import layers\n"
        "heavy = {'transformers', 'wandb', 'flashinfer', 'transformer_engine', 'sglang', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = _python(code, XDG_CACHE_HOME=str(blocked), TMPDIR=str(blocked))
    assert result.returncode == 0, result.stderr
    assert not result.stderr


def test_the_cache_is_not_used_when_others_can_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_import.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    directory = cpu_import._cache_directory()
    assert directory == tmp_path / "slime" / "megatron_cpu"
    directory.chmod(0o777)
    fallback = cpu_import._cache_directory()
    assert fallback is not None
    assert fallback.is_relative_to(tmp_path / "temporary")
    fallback.parent.chmod(0o777)  # others could put a directory of theirs in its place
    assert cpu_import._cache_directory() is None


def test_the_groups_of_a_single_rank_share_a_thread() -> None:
    install()
    from megatron.core import parallel_state as mpu

    for _ in range(2):  # the second run has new groups
        with single_rank():
            torch.distributed.init_process_group("gloo")
            before = _num_gloo_threads()
            mpu.initialize_model_parallel(create_gloo_process_groups=False)
            groups = [mpu.get_tensor_model_parallel_group(), mpu.get_expert_model_parallel_group()]
            assert groups[0] is groups[1]
            assert torch.distributed.get_world_size(groups[0]) == 1
            torch.distributed.barrier(group=groups[0])
            assert _num_gloo_threads() <= before + 2, "Megatron makes 20 groups"


def _num_gloo_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 64])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_swiglu_on_a_cpu_equals_single_operators_and_joins_no_halves(
    dtype: torch.dtype, width: int, is_weighted: bool
) -> None:
    install()
    from megatron.core.fusions import fused_bias_swiglu as fused

    generator = torch.Generator().manual_seed(0)
    gate_up, gradient = (torch.randn(33, columns, generator=generator).to(dtype) for columns in (2 * width, width))
    inputs = [gate_up] + [torch.rand(33, 1, generator=generator)] * is_weighted
    ours, plain = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    with Operators() as operators:
        out = (
            fused.weighted_bias_swiglu_impl(ours[0], None, ours[1])
            if is_weighted
            else fused.bias_swiglu_impl(*ours, None)
        )
        out.backward(gradient)
    gate, up = plain[0].chunk(2, dim=-1)
    reference = torch.nn.functional.silu(gate) * up
    reference = (reference * plain[1]).to(dtype) if is_weighted else reference
    reference.backward(gradient)
    assert torch.equal(out, reference)
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, plain, strict=True))
    assert operators.names.count("aten::silu") == 1
    assert not {"aten::cat", "aten::sigmoid"} & set(operators.names)


def test_the_norm_of_all_gradients_is_computed_without_reading_that_of_each() -> None:
    install()
    from megatron.core.optimizer import clip_grads

    gradients = [torch.randn(3, 5), torch.randn(7), torch.randn(2, 2, 2)]
    with Operators() as operators:
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, torch.zeros(1), [gradients], False)
    assert norm.shape == (1,)
    torch.testing.assert_close(norm[0], torch.cat([one.flatten() for one in gradients]).norm())
    assert "aten::_local_scalar_dense" not in operators.names


def test_a_reduction_of_a_non_contiguous_tensor_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    from megatron.core.tensor_parallel import mappings

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(2))
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(mappings._reduce(x, SimpleNamespace(size=lambda: 2)), 2 * torch.arange(6.0).view(2, 3).t())
