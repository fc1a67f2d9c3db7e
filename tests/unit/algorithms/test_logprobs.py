"""Log-probs and entropy against dense log_softmax and autograd, alone and over two gloo ranks. Memory and chunking."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime.algorithms import logprobs
from slime.algorithms.logprobs import SamplingMask, log_probs_and_entropy
from tests.unit.algorithms.two_ranks import computed, run_ranks
from tests.verification import verify

WIDTH = 16  # columns of the (padded) vocabulary


def dense(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float):
    """The definition, in fp64."""
    log_p = torch.log_softmax(logits.double()[:, :vocab_size] / temperature, dim=1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def make_case(seed: int, *, vocab_size: int, temperature: float = 1.0, chunk_size: int = -1, rows: int = 7) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(rows, WIDTH, generator=g) * 4,
        "targets": torch.randint(0, vocab_size, (rows,), generator=g),
        "w_lp": torch.randn(rows, generator=g),
        "w_h": torch.randn(rows, generator=g),
        "vocab_size": vocab_size,
        "temperature": temperature,
        "chunk_size": chunk_size,
    }


def expected(case: dict) -> dict:
    logits = case["logits"].double().requires_grad_()
    log_probs, entropy = dense(logits, case["targets"], case["vocab_size"], case["temperature"])
    (log_probs @ case["w_lp"].double() + entropy @ case["w_h"].double()).backward()
    return {"log_probs": log_probs.detach().float(), "entropy": entropy.detach().float(), "grad": logits.grad.float()}


_NAMES = {"log_probs": "log-probs", "entropy": "entropy", "grad": "gradient by logits"}


def assert_equal_results(actual: dict, wanted: dict) -> None:
    for name in ("log_probs", "entropy", "grad"):
        what = f"vocabulary-parallel {_NAMES[name]}"
        verify(what, "dense fp64", actual[name], wanted[name], tolerance=1e-5, scale="mixed")


CASES = [
    make_case(seed, vocab_size=vocab, temperature=temperature, chunk_size=chunk)
    for seed, (vocab, temperature, chunk) in enumerate(itertools.product((16, 13, 5), (1.0, 0.7), (-1, 1, 3, 100)))
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"v{c['vocab_size']}-t{c['temperature']}-c{c['chunk_size']}")
def test_one_rank_equals_log_softmax_and_its_gradient(case):
    actual = computed(case, case["logits"])
    assert_equal_results(actual, expected(case))
    assert torch.all(actual["grad"][:, case["vocab_size"] :] == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy_grad", [False, True])
@pytest.mark.parametrize("case", CASES[::4], ids=lambda c: f"v{c['vocab_size']}-t{c['temperature']}")
def test_the_functions_that_cuda_compiles_give_the_same_values_and_gradients(
    case, with_entropy_grad, dtype, monkeypatch
):
    settings = {"vocab_size": case["vocab_size"], "temperature": case["temperature"]}
    found = []
    for is_compiled in (False, True):
        monkeypatch.setattr(logprobs, "_runs_compiled", lambda *_, answer=is_compiled: answer)
        monkeypatch.setattr(logprobs, "_compiled", lambda function: function)
        leaf = case["logits"].clone().to(dtype).requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            leaf, case["targets"], with_entropy=True, with_entropy_grad=with_entropy_grad, **settings
        )
        (log_probs @ case["w_lp"] + (entropy @ case["w_h"] if with_entropy_grad else 0.0)).backward()
        found.append((log_probs.detach(), entropy.detach(), leaf.grad))
    for separate, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, separate, atol=1e-5, rtol=1e-2 if fused.dtype == torch.bfloat16 else 1e-5)


def test_two_gloo_ranks_equal_log_softmax_even_where_one_holds_only_padding(tmp_path):
    nucleus = [case | {"keep": some_ids(case)} for case in CASES[::5]]
    for case in nucleus:
        case["keep"][0, case["targets"][0]] = True  # as sets of ids no row may be empty
    sets = [case | dict(zip(("keep", "offsets"), as_sets(case["keep"]), strict=True)) for case in nucleus]
    first, second = run_ranks("log_probs", tmp_path, [*CASES, *nucleus, *sets])
    for case, left, right in zip([*CASES, *nucleus, *nucleus], first, second, strict=True):
        wanted = nucleus_reference(case, case["keep"]) if "keep" in case else expected(case)
        assert torch.equal(left["log_probs"], right["log_probs"])
        assert torch.equal(left["entropy"], right["entropy"])
        assert_equal_results(left | {"grad": torch.cat([left["grad"], right["grad"]], dim=1)}, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_do_not_depend_on_the_chunk_size(dtype):
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(50, 64, generator=g).to(dtype), torch.randint(0, 64, (50,), generator=g)

    def run(chunk_size: int) -> list[torch.Tensor]:
        x = logits.clone().requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            x, targets, chunk_size=chunk_size, with_entropy=True, temperature=0.9
        )
        (log_probs.sum() + entropy.sum()).backward()
        return [log_probs.detach(), entropy.detach(), x.grad]

    reference = run(-1)
    assert reference[0].dtype == torch.float32
    assert reference[2].dtype == dtype
    for chunk_size in (1, 7, 50, 51):
        for a, b in zip(run(chunk_size), reference, strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_bf16_logits_are_summed_in_fp32():
    g = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(9, 1000, generator=g).bfloat16(), torch.randint(0, 1000, (9,), generator=g)
    log_probs, entropy = log_probs_and_entropy(logits, targets, with_entropy=True)
    wanted = dense(logits, targets, 1000, 1.0)
    torch.testing.assert_close(log_probs, wanted[0].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, wanted[1].float(), atol=1e-5, rtol=1e-5)


def some_ids(case: dict) -> torch.Tensor:
    g = torch.Generator().manual_seed(9)
    keep = torch.rand(case["logits"].shape, generator=g) < 0.3
    keep[0] = False  # only the sampled token is left: log-prob 0
    keep[1] = True
    keep[2, : WIDTH // 2] = False  # nothing on the first of two ranks
    return keep


def as_sets(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, offsets) of a mask as an engine returns them, int32."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), dense.sum(1).cumsum(0).int()])
    return dense.nonzero()[:, 1].int(), offsets


def nucleus_reference(case: dict, keep: torch.Tensor) -> dict:
    """log softmax over the kept ids and the target, and entropy over the vocabulary, in fp64."""
    logits = case["logits"].double().requires_grad_()
    targets, vocab_size = case["targets"], case["vocab_size"]
    kept = keep | torch.nn.functional.one_hot(targets, WIDTH).bool()
    scaled = logits / case["temperature"]
    nucleus = scaled.masked_fill(~kept, -torch.inf)[:, :vocab_size]
    log_probs = nucleus.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    entropy = dense(logits, targets, vocab_size, case["temperature"])[1]
    (log_probs @ case["w_lp"].double() + entropy @ case["w_h"].double()).backward()
    return {"log_probs": log_probs.detach().float(), "entropy": entropy.detach().float(), "grad": logits.grad.float()}


@pytest.mark.parametrize("case", CASES[::3], ids=lambda c: f"v{c['vocab_size']}-t{c['temperature']}-c{c['chunk_size']}")
def test_a_keep_mask_renormalises_over_the_nucleus_and_the_sampled_token(case):
    keep = some_ids(case)
    case = case | {"logits": case["logits"].clone()}
    case["logits"][0, case["targets"][0]] -= 300  # far below the largest logit
    actual = computed(case, case["logits"], keep=keep)
    assert actual["log_probs"][0] == 0
    assert_equal_results(actual, nucleus_reference(case, keep))


def test_a_keep_mask_of_everything_changes_nothing():
    case = CASES[0]
    plain = log_probs_and_entropy(case["logits"], case["targets"])[0]
    kept = log_probs_and_entropy(case["logits"], case["targets"], keep=torch.ones_like(case["logits"]).bool())[0]
    assert torch.equal(plain, kept)
    with pytest.raises(ValueError, match="keep must have the shape"):
        log_probs_and_entropy(case["logits"], case["targets"], keep=torch.ones(2, 2).bool())


def test_huge_logits_neither_overflow_nor_lose_the_target():
    log_probs, entropy = log_probs_and_entropy(
        torch.tensor([[1e4, 0.0], [-1e4, 0.0]]), torch.tensor([0, 1]), with_entropy=True
    )
    assert torch.equal(log_probs, torch.zeros(2))
    assert torch.equal(entropy, torch.zeros(2))


def test_entropy_is_only_computed_and_only_differentiated_on_request():
    logits, targets = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 1, 2])
    assert log_probs_and_entropy(logits, targets)[1] is None
    log_probs, entropy = log_probs_and_entropy(logits, targets, with_entropy=True, with_entropy_grad=False)
    assert not entropy.requires_grad
    log_probs.sum().backward()
    wanted = torch.nn.functional.one_hot(targets, 8) - torch.softmax(logits.detach(), 1)
    torch.testing.assert_close(logits.grad, wanted)


def test_backward_may_run_twice_and_gives_the_same_gradient():
    logits, targets = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 1, 2])
    log_probs, _ = log_probs_and_entropy(logits, targets)
    first = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(log_probs.sum(), logits)[0])


def test_no_rows_give_empty_results_and_an_empty_gradient():
    logits = torch.randn(0, 8, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(
        logits, torch.zeros(0, dtype=torch.int64), with_entropy=True, chunk_size=4
    )
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 8)


def test_a_target_in_the_padding_gives_nan_instead_of_a_wrong_number():
    log_probs, _ = log_probs_and_entropy(torch.zeros(2, 8), torch.tensor([5, 4]), vocab_size=5)
    assert log_probs[0].isnan()
    assert log_probs[1] == pytest.approx(-1.6094379)


def test_misfits_are_rejected():
    with pytest.raises(ValueError, match="targets"):
        log_probs_and_entropy(torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="vocab_size 9"):
        log_probs_and_entropy(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), vocab_size=9)
    with pytest.raises(ValueError, match="rollout-temperature"):
        log_probs_and_entropy(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), temperature=0.0)


def peak_bytes(run) -> int:
    """Peak bytes that ``run`` allocated in addition to those allocated before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("with_entropy", "with_keep"), [(False, False), (True, False), (False, True), (True, True)])
def test_memory_is_one_chunk_forward_and_the_gradient_plus_that_backward(with_entropy, with_keep, dtype):
    rows, vocab, chunk = 512, 8192, 64
    logits = torch.randn(rows, vocab).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,))
    ids, offsets = torch.randint(0, vocab, (rows * 3,)), torch.arange(rows + 1) * 3
    keep = SamplingMask.of([ids], [offsets]) if with_keep else None
    chunk_bytes = chunk * vocab * 4
    out: list[torch.Tensor] = []

    def forward() -> None:
        log_probs, entropy = log_probs_and_entropy(
            logits, targets, chunk_size=chunk, with_entropy=with_entropy, keep=keep
        )
        out.append(log_probs.sum() + (entropy.sum() if with_entropy else 0))

    assert peak_bytes(forward) <= 1.2 * chunk_bytes
    # with two distributions autograd adds up two gradients
    gradients = (2 if with_entropy and with_keep else 1) * logits.numel() * logits.element_size()
    assert peak_bytes(lambda: out[0].backward()) <= gradients + 1.2 * chunk_bytes


def test_a_cpu_takes_all_rows_at_once_by_default():
    logits, targets = torch.randn(300, 1024), torch.randint(0, 1024, (300,))
    peaks = {
        size: peak_bytes(lambda size=size: log_probs_and_entropy(logits, targets, chunk_size=size))
        for size in (None, -1, 100)
    }
    assert peaks[None] == peaks[-1] > 2 * peaks[100]


def test_cuda_without_a_compiler_takes_chunks_by_default(monkeypatch):
    from slime.algorithms.arguments import AlgorithmArgs

    assert AlgorithmArgs().log_probs_chunk_size is None
    rows: list[int] = []
    stock = logprobs._Plan.chunks

    def chunks(plan, num_rows, width):
        parts = list(stock(plan, num_rows, width))
        rows.extend(part.stop - part.start for part in parts)
        return iter(parts)

    monkeypatch.setattr(logprobs._Plan, "chunks", chunks)
    monkeypatch.setattr(logprobs, "can_compile", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    log_probs_and_entropy(torch.randn(2500, 4), torch.zeros(2500, dtype=torch.int64), chunk_size=None)
    assert rows == [1024, 1024, 452]
