"""The policy loss against a plain loop over tokens in fp64: loss, gradients and every metric, for all its options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.policy_loss import Correction, PolicyTokens, icepop, policy_loss
from slime.algorithms.reduce import Samples
from tests.verification import verify

# Response lengths with their masks: ordinary, one token, empty, partly and fully masked.
MASKS = [[1, 1, 0], [1], [], [0, 1, 1, 1], [0, 0]]
DENOMINATORS = [5.0, 1.0, 0.0, 5.0, 0.0]  # samples 0 and 3 are one rollout
LENGTHS = [len(mask) for mask in MASKS]
TOTAL = sum(LENGTHS)


def make_samples(*, per_token: bool = False) -> Samples:
    masks = [torch.tensor(mask, dtype=torch.int32) for mask in MASKS]
    return Samples(LENGTHS, masks, torch.tensor(DENOMINATORS), per_token=per_token)


def make_tokens(seed: int) -> PolicyTokens:
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(TOTAL, generator=g) * 3
    return PolicyTokens(
        log_probs=(old + torch.randn(TOTAL, generator=g) * 0.5).requires_grad_(),
        advantages=torch.randn(TOTAL, generator=g),
        entropy=torch.rand(TOTAL, generator=g).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old + torch.randn(TOTAL, generator=g) * 0.4,
        ref_log_probs=old + torch.randn(TOTAL, generator=g) * 0.3,
    )


@dataclass(frozen=True)
class Case:
    """Settings, and the inputs of the loop: which correction, and whether old log-probs are reused."""

    settings: AlgorithmArgs
    correction: str = "none"
    is_reused: bool = False


# ---------------------------------------------------------------------------------------------------- the loop


class Loop:
    """The definition, token by token, with fp64 scalars. It shares no code with the tested function."""

    def __init__(self, tokens: PolicyTokens, case: Case) -> None:
        self.s, self.case = case.settings, case
        self.new = [x.double() for x in tokens.log_probs]
        self.entropy = [x.double() for x in tokens.entropy]
        self.advantages = tokens.advantages.double().tolist()
        self.engine = tokens.rollout_log_probs.double().tolist()
        self.reference = tokens.ref_log_probs.double().tolist()
        given = tokens.old_log_probs.double().tolist()
        constant = [float(x.detach()) for x in self.new]
        self.trained = constant if case.is_reused else given
        self.old = self.trained
        if self.s.use_rollout_logprobs:
            self.old = self.engine
        elif self.s.true_on_policy_mode:
            self.old = constant
        self.sums: dict[str, object] = {}

    def run(self) -> dict[str, torch.Tensor]:
        position = 0
        for mask, denominator in zip(MASKS, DENOMINATORS, strict=True):
            self._sample(range(position, position + len(mask)), mask, denominator)
            position += len(mask)
        out = dict(self.sums)
        loss = out["pg_loss"] - self.s.entropy_coef * out["entropy_loss"]
        if self.s.use_kl_loss:
            loss = loss + self.s.kl_loss_coef * out["kl_loss"]
        return {"loss": loss, **out}

    def _sample(self, positions: range, mask: list[int], denominator: float) -> None:
        s = self.s
        count = max(sum(mask), 1)
        mean_gap = sum((m * (self.old[p] - self.new[p]) for m, p in zip(mask, positions, strict=True)), start=0.0)
        mean_gap = torch.as_tensor(mean_gap / count, dtype=torch.float64)
        for m, p in zip(mask, positions, strict=True):
            weight = 1.0 if s.calculate_per_token_loss else 1.0 / max(denominator, 1.0)
            observed = m * weight
            w = math.exp(self.trained[p] - self.engine[p])
            kept = 0 if self.case.correction == "reject" and s.use_tis and w > 1.2 else m
            counted = kept * weight
            gap = mean_gap if s.advantage_estimator == "gspo" else self.old[p] - self.new[p]
            loss, clipped = self._surrogate(gap, p)
            if s.use_opsm:
                hit = self.advantages[p] < 0 and float(mean_gap.detach()) > s.opsm_delta
                loss = loss * (0.0 if hit else 1.0)
                self._add("opsm_clipfrac", observed * float(hit))
            if s.use_tis or s.get_mismatch_metrics:
                loss = self._correct(loss, w, observed)
                self._add("ois", observed * torch.exp(-torch.as_tensor(gap)))
            self._add("pg_loss", counted * loss)
            self._add("entropy_loss", counted * self.entropy[p])
            self._add("pg_clipfrac", counted * clipped)
            self._add("ppo_kl", counted * gap)
            compared = self.new[p] if s.use_rollout_logprobs else self.old[p]
            self._add("train_rollout_logprob_abs_diff", observed * abs(compared - self.engine[p]))
            if s.use_kl_loss:
                self._add("kl_loss", counted * self._kl(p))

    def _surrogate(self, gap: object, p: int) -> tuple[object, float]:
        s, a = self.s, self.advantages[p]
        ratio = torch.exp(-torch.as_tensor(gap, dtype=torch.float64))
        low, high = 1 - s.eps_clip, 1 + (s.eps_clip if s.eps_clip_high is None else s.eps_clip_high)
        value = float(ratio.detach())
        if s.advantage_estimator == "cispo":
            bounded = min(max(value, low), high)
            return -bounded * a * self.new[p], float(bounded != value)
        bounded = ratio if low <= value <= high else torch.tensor(low if value < low else high, dtype=torch.float64)
        is_clipped = -float(bounded.detach()) * a > -value * a
        loss = -bounded * a if is_clipped else -ratio * a
        if s.eps_clip_c is not None and a < 0 and -s.eps_clip_c * a < float(torch.as_tensor(loss).detach()):
            loss = torch.tensor(-s.eps_clip_c * a, dtype=torch.float64)
        return loss, float(is_clipped)

    def _correct(self, loss: object, w: float, observed: float) -> object:
        s = self.s
        match self.case.correction:
            case "truncate":
                used = min(max(w, s.tis_clip_low), s.tis_clip)
            case "icepop":
                used = w if s.tis_clip_low <= w <= s.tis_clip else 0.0
            case "reject":
                self._add("mine", observed * w)
                return loss * (3.0 if s.use_tis else 1.0)
            case other:
                raise AssertionError(other)
        self._add("tis", observed * w)
        self._add("tis_clipfrac", observed * float(used != w))
        self._add("tis_abs", observed * abs(w - 1))
        return loss * used if s.use_tis else loss

    def _kl(self, p: int) -> torch.Tensor:
        d = self.new[p] - self.reference[p]
        match self.s.kl_loss_type:
            case "k1":
                kl = d
            case "k2":
                kl = d * d / 2
            case _:
                kl = torch.exp(-d) - 1 + d
        if self.s.use_unbiased_kl:
            kl = kl * torch.exp(self.new[p] - self.old[p])
        if self.s.kl_loss_type == "low_var_kl" and abs(kl.item()) > 10:
            kl = torch.tensor(math.copysign(10.0, kl.item()), dtype=torch.float64)
        return kl

    def _add(self, name: str, value: object) -> None:
        self.sums[name] = self.sums.get(name, torch.zeros((), dtype=torch.float64)) + value


# ---------------------------------------------------------------------------------------------------- the cases


def reject(pg_loss: torch.Tensor, train: torch.Tensor, engine: torch.Tensor) -> Correction:
    """A user's correction: triples the loss and stops training on tokens with a weight above 1.2."""
    w = torch.exp(train - engine)
    masks = [mask * (part <= 1.2).int() for mask, part in zip(make_samples().loss_masks, w.split(LENGTHS), strict=True)]
    return Correction(3 * pg_loss, masks, {"mine": w})


def corrections(s: AlgorithmArgs, name: str):
    match name:
        case "icepop":
            return lambda *x: icepop(*x, s.tis_clip_low, s.tis_clip)
        case "reject":
            return reject
        case _:
            return None


CLIPS = [
    {},
    {"eps_clip": 0.1, "eps_clip_high": 0.28},
    {"eps_clip": 0.1, "eps_clip_c": 1.3},
    {"eps_clip": 1.0, "eps_clip_high": 0.4, "eps_clip_c": 3.0},
]
KLS = [
    {},
    *({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")),
    *(
        {"use_kl_loss": True, "kl_loss_coef": 2.0, "kl_loss_type": kind, "use_unbiased_kl": True}
        for kind in ("k2", "low_var_kl")
    ),
]
CORRECTIONS = [
    ("none", {}),
    ("truncate", {"use_tis": True}),
    ("truncate", {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9}),
    ("truncate", {"get_mismatch_metrics": True}),
    ("icepop", {"use_tis": True, "tis_clip": 1.3, "tis_clip_low": 0.8}),
    ("reject", {"use_tis": True}),
    ("reject", {"get_mismatch_metrics": True}),
]
OLD = [({}, False), ({}, True), ({"use_rollout_logprobs": True}, False), ({"true_on_policy_mode": True}, False)]


def cases(estimator: str, per_token: bool) -> Iterator[Case]:
    """All valid combinations of clip, correction and old log-probs, and every kind of KL with each of their values.

    The KL is a term of its own. The entropy bonus and OPSM are switched with the rest.
    """
    product = itertools.product(enumerate(CLIPS), CORRECTIONS, OLD)
    valid = (each for each in product if not (each[2][0] and each[1][1].get("use_tis")))  # the command line refuses it
    for number, ((shift, clip), (correction, correct), (old, is_reused)) in enumerate(valid):
        kl = KLS[(number + 3 * shift) % len(KLS)]
        settings = AlgorithmArgs(
            advantage_estimator=estimator,
            calculate_per_token_loss=per_token,
            entropy_coef=(0.0, 0.01)[number // len(OLD) % 2],
            use_opsm=number % 3 == 0,
            opsm_delta=0.05,
            **clip,
            **kl,
            **correct,
            **old,
        )
        yield Case(settings, correction, is_reused)


_LOOP = "a loop over tokens in fp64"


def check(tokens: PolicyTokens, case: Case) -> None:
    s = case.settings
    given = replace(tokens, old_log_probs=None) if case.is_reused else tokens
    samples = make_samples(per_token=s.calculate_per_token_loss)
    out = policy_loss(given, s, samples, correct=corrections(s, case.correction))
    wanted = Loop(tokens, case).run()
    assert set(out.metrics) == set(wanted)
    for name, value in out.metrics.items():
        assert not value.requires_grad
        figures = value, torch.as_tensor(wanted[name])
        verify(f"losses and metrics of {s.advantage_estimator}", _LOOP, *figures, tolerance=1e-5, scale="mixed")
    leaves = (tokens.log_probs, tokens.entropy)
    actual = torch.autograd.grad(out.loss, leaves, allow_unused=True, materialize_grads=True)
    reference = torch.autograd.grad(wanted["loss"], leaves, allow_unused=True, materialize_grads=True)
    for a, b in zip(actual, reference, strict=True):
        verify(f"gradients of {s.advantage_estimator}", _LOOP, a, b, tolerance=1e-5, scale="mixed")


@pytest.mark.parametrize("per_token", [False, True], ids=["rollout-mean", "per-token"])
@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_loss_gradients_and_metrics_equal_a_loop_over_tokens(estimator, per_token):
    for number, case in enumerate(cases(estimator, per_token)):
        try:
            check(make_tokens(number % 7), case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_old_log_probs_of_the_same_weights_give_a_ratio_of_exactly_one_and_the_gradient_of_reinforce():
    tokens = replace(make_tokens(0), old_log_probs=None)
    samples = make_samples(per_token=True)
    for estimator in ("grpo", "gspo", "cispo"):
        out = policy_loss(tokens, AlgorithmArgs(advantage_estimator=estimator), make_samples(per_token=True))
        assert out.metrics["ppo_kl"] == 0
        assert out.metrics["pg_clipfrac"] == 0
        if estimator != "gspo":
            (grad,) = torch.autograd.grad(out.loss, tokens.log_probs)
            assert torch.equal(grad, torch.where(samples.mask, -tokens.advantages, 0.0))


def test_metrics_come_in_one_order():
    settings = AlgorithmArgs(
        use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", use_tis=True, use_opsm=True, entropy_coef=0.1
    )
    tokens = replace(make_tokens(0), opd_reverse_kl=torch.ones(TOTAL))
    out = policy_loss(tokens, settings, make_samples())
    wanted = "loss pg_loss entropy_loss pg_clipfrac ppo_kl train_rollout_logprob_abs_diff kl_loss ois tis tis_clipfrac "
    assert list(out.metrics) == (wanted + "tis_abs opsm_clipfrac opd_reverse_kl").split()
    assert out.metrics["opd_reverse_kl"] == make_samples().reducer()(torch.ones(TOTAL))


def test_a_users_reducer_reduces_the_policy_gradient_term_only_with_the_masks_after_the_correction():
    seen = []

    def make(masks):
        seen.append([mask.tolist() for mask in masks])
        return lambda values: 10 * values.sum()

    tokens, settings = make_tokens(1), AlgorithmArgs(use_tis=True, entropy_coef=0.5)
    out = policy_loss(tokens, settings, make_samples(), correct=reject, make_pg_reducer=make)
    plain = policy_loss(tokens, settings, make_samples(), correct=reject)
    unreduced: list[torch.Tensor] = []
    policy_loss(
        tokens,
        settings,
        make_samples(),
        correct=reject,
        make_pg_reducer=lambda _: lambda v: unreduced.append(v) or v.sum(),
    )
    torch.testing.assert_close(out.metrics["pg_loss"], 10 * unreduced[0].detach().sum())
    assert out.metrics["entropy_loss"] == plain.metrics["entropy_loss"]
    assert seen == [
        [
            mask.tolist()
            for mask in reject(torch.zeros(TOTAL), tokens.old_log_probs, tokens.rollout_log_probs).loss_masks
        ]
    ]
    assert seen != [MASKS]


def test_tokens_that_are_not_trained_cannot_overflow_the_gradient():
    tokens = make_tokens(0)
    trained = make_samples().mask
    settings = AlgorithmArgs(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", use_unbiased_kl=True, use_tis=True)
    wild = {
        name: torch.where(trained, getattr(tokens, name), torch.tensor(-300.0))
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    }
    for estimator in ("grpo", "gspo", "cispo"):
        out = policy_loss(replace(tokens, **wild), replace(settings, advantage_estimator=estimator), make_samples())
        (grad,) = torch.autograd.grad(out.loss, tokens.log_probs)
        assert torch.isfinite(grad).all()
        assert torch.all(grad[~trained] == 0)
        assert all(torch.isfinite(value) for value in out.metrics.values())


def test_a_micro_batch_without_samples_or_without_tokens_has_a_zero_loss_with_a_graph():
    leaf = torch.zeros(0, requires_grad=True)
    empty = PolicyTokens(*[leaf] + [torch.zeros(0)] * 5)
    settings = AlgorithmArgs(use_tis=True, use_opsm=True, use_kl_loss=True, kl_loss_coef=1.0)
    for estimator, lengths in itertools.product(("grpo", "gspo", "cispo"), ([], [0, 0])):
        samples = Samples(lengths, [torch.zeros(0, dtype=torch.int32) for _ in lengths], torch.zeros(len(lengths)))
        out = policy_loss(empty, replace(settings, advantage_estimator=estimator), samples)
        out.loss.backward()
        assert out.loss == 0


@pytest.mark.parametrize(
    ("settings", "missing", "flag"),
    [
        (AlgorithmArgs(use_kl_loss=True), "ref_log_probs", "--use-kl-loss"),
        (AlgorithmArgs(use_rollout_logprobs=True), "rollout_log_probs", "--use-rollout-logprobs"),
        (AlgorithmArgs(use_tis=True), "rollout_log_probs", "--use-tis"),
        (AlgorithmArgs(get_mismatch_metrics=True), "rollout_log_probs", "--get-mismatch-metrics"),
        (AlgorithmArgs(entropy_coef=0.1), "entropy", "--entropy-coef"),
    ],
)
def test_log_probs_that_a_flag_needs_and_the_batch_lacks_are_an_error_with_the_flag(settings, missing, flag):
    with pytest.raises(ValueError, match=flag):
        policy_loss(replace(make_tokens(0), **{missing: None}), settings, make_samples())


def test_gspo_gives_every_trained_token_of_a_sample_the_same_gradient_per_unit_of_advantage():
    tokens = replace(make_tokens(3), advantages=torch.ones(TOTAL))
    settings = AlgorithmArgs(advantage_estimator="gspo", eps_clip=10.0)
    out = policy_loss(tokens, settings, make_samples())
    (grad,) = torch.autograd.grad(out.loss, tokens.log_probs)
    for part, mask in zip(grad.split(LENGTHS), MASKS, strict=True):
        trained = part[torch.tensor(mask, dtype=torch.bool)]
        assert trained.numel() == 0 or torch.allclose(trained, trained[0].expand_as(trained))


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("per_token", [False, True])
def test_micro_batches_of_any_cut_add_up_to_the_whole_batch(estimator, per_token):
    settings = AlgorithmArgs(
        advantage_estimator=estimator,
        calculate_per_token_loss=per_token,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_loss_type="k3",
        entropy_coef=0.1,
        use_tis=True,
        use_opsm=True,
    )
    tokens = make_tokens(5)
    whole = policy_loss(tokens, settings, make_samples(per_token=per_token))
    wanted = torch.autograd.grad(whole.loss, (tokens.log_probs, tokens.entropy))
    for cuts in ([1, 4], [2, 3, 4], [0, 1, 2, 3, 4]):
        borders = [0, *cuts, len(LENGTHS)]
        outs = []
        for a, b in itertools.pairwise(borders):
            begin, end = sum(LENGTHS[:a]), sum(LENGTHS[:b])
            part = PolicyTokens(**{name: None if v is None else v[begin:end] for name, v in vars(tokens).items()})
            full = make_samples(per_token=per_token)
            outs.append(
                policy_loss(
                    part,
                    settings,
                    Samples(LENGTHS[a:b], full.loss_masks[a:b], full.rollout_mask_sums[a:b], per_token=per_token),
                )
            )
        for name, value in whole.metrics.items():
            torch.testing.assert_close(sum(out.metrics[name] for out in outs), value, atol=1e-5, rtol=1e-5)
        grads = torch.autograd.grad(sum(out.loss for out in outs), (tokens.log_probs, tokens.entropy))
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
