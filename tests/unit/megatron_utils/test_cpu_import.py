"""The rewriting of megatron.core for a CPU, when it is imported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.backends.megatron_utils import cpu_import


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


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_installing_too_late_is_an_error() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core'); "
        "from slime.backends.megatron_utils import cpu_import; cpu_import.install()"
    )
    assert "megatron.core was imported before the CPU rewriting" in _python(code).stderr


def test_a_package_that_has_replaced_the_loader_of_source_files_does_not_prevent_the_rewriting() -> None:
    """As beartype does, which fastmcp imports, and with it OpenEnv."""
    code = (
        "import sys\n"
        "from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder\n"
        "from slime.backends.megatron_utils import cpu_import\n"
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
        "from slime.backends.megatron_utils.patches import install\n"
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


def test_linked_environments_share_their_code_objects(tmp_path: Path) -> None:
    name, source, link = "megatron.core.module", tmp_path.resolve() / "module.py", tmp_path / "link.py"
    source.write_text("value = 1\n")
    link.symlink_to(source)
    written = []
    for path in (source, link):
        assert cpu_import._Loader(name, str(path), tmp_path).get_code(name).co_filename == str(source)
        written += [file.stat().st_ino for file in tmp_path.glob("*.bin")]
    assert len(written) == 2
    assert len({*written}) == 1, "the second one reads what the first one has compiled"
