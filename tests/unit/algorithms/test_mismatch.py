"""Weights between trainer and engine against plain loops: the helper with its levels, dropped sequences, values."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from slime.algorithms.mismatch import MismatchSettings, compute_mis_weights
from slime.algorithms.policy_loss import drifted_tokens
from slime.algorithms.ppo import value_loss
from slime.algorithms.reduce import Samples, make_reducer
from tests.verification import verify

MASKS = [[1, 1, 0, 1], [1], [0, 1, 1], [0, 0]]
PLAIN = MismatchSettings(
    use_tis=True,
    use_rs=False,
    tis_level="token",
    rs_level="token",
    tis_mode="truncate",
    tis_lower_bound=None,
    tis_upper_bound=1.5,
    rs_lower_bound=None,
    rs_upper_bound=None,
    rs_veto_threshold=None,
    tis_batch_normalize=False,
)


def rows(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [-torch.rand(len(mask), generator=g) * 2 * scale for mask in MASKS]


def masks() -> list[torch.Tensor]:
    return [torch.tensor(mask, dtype=torch.int32) for mask in MASKS]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def ratio(rho: list[float], mask: list[int], level: str, t: int) -> float:
    kept = [r for r, m in zip(rho, mask, strict=True) if m]
    log = {"token": rho[t], "sequence": sum(kept), "geometric": mean(kept)}[level]
    return math.exp(max(-20.0, min(20.0, log)))


def loop(s: MismatchSettings, train: list[list[float]], engine: list[list[float]]) -> tuple[list, list]:
    """(weights, masks) as nested floats."""
    weights, kept = [], []
    low, high = s.tis_lower_bound or 1 / s.tis_upper_bound, s.tis_upper_bound
    rs_low, rs_high = s.rs_lower_bound or low, s.rs_upper_bound or high
    for i, mask in enumerate(MASKS):
        rho = [a - b for a, b in zip(train[i], engine[i], strict=True)]
        row, new = [], []
        vetoed = s.use_rs and s.rs_veto_threshold is not None
        vetoed = vetoed and any(m and r < math.log(s.rs_veto_threshold) for r, m in zip(rho, mask, strict=True))
        for t, m in enumerate(mask):
            w, survives = ratio(rho, mask, s.tis_level, t), m
            if s.tis_mode == "truncate":
                w = min(w, high)
            elif s.tis_mode == "clip":
                w = max(low, min(w, high))
            elif not low <= w <= high:
                survives = 0
            row.append(w * (survives if s.tis_mode == "mask" else m))
            rejected = s.use_rs and not rs_low <= ratio(rho, mask, s.rs_level, t) <= rs_high
            new.append(0 if rejected or vetoed else survives)
        weights.append(row)
        kept.append(new)
    if s.tis_batch_normalize:
        flat = [(w, m) for ws, ms in zip(weights, kept, strict=True) for w, m in zip(ws, ms, strict=True)]
        if s.tis_level == "token":
            factor = mean([w for w, m in flat if m])
        else:
            per_sample = [[w for w, m in zip(ws, ms, strict=True) if m] for ws, ms in zip(weights, kept, strict=True)]
            factor = mean([mean(ws) for ws in per_sample if ws])
        weights = [[w / factor if factor > 1e-8 else w for w in row] for row in weights]
    return weights, kept


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_and_masks_equal_a_loop_over_tokens(level, mode):
    changed = 0
    for rs_level, use_rs, veto, normalises, seed in itertools.product(
        ("token", "sequence", "geometric"), (False, True), (None, 0.4), (False, True), range(2)
    ):
        if normalises and level == "geometric":
            continue
        s = replace(
            PLAIN,
            tis_level=level,
            tis_mode=mode,
            rs_level=rs_level,
            use_rs=use_rs,
            rs_veto_threshold=veto,
            tis_batch_normalize=normalises,
            rs_lower_bound=0.6,
        )
        train, engine = rows(seed), rows(seed + 10)
        weights, kept, metrics = compute_mis_weights(
            s, train_log_probs=train, rollout_log_probs=engine, loss_masks=masks()
        )
        wanted, wanted_masks = loop(s, [r.double().tolist() for r in train], [r.double().tolist() for r in engine])
        assert [mask.tolist() for mask in kept] == wanted_masks
        assert [mask.dtype for mask in kept] == [torch.int32] * len(MASKS)
        for a, b in zip(weights, wanted, strict=True):
            verify("mismatch weights (MIS)", "a loop over tokens", a, torch.tensor(b), tolerance=1e-5, scale="mixed")
        assert all([len(row) for row in rows_] == [len(m) for m in MASKS] for rows_ in metrics.values())
        changed += wanted_masks != MASKS
    assert changed > 0


def test_distances_are_those_of_the_definition():
    train, engine = rows(1), rows(2)
    _, _, metrics = compute_mis_weights(PLAIN, train_log_probs=train, rollout_log_probs=engine, loss_masks=masks())
    for i, mask in enumerate(MASKS[:3]):
        a = [x for x, m in zip(train[i].tolist(), mask, strict=True) if m]
        b = [x for x, m in zip(engine[i].tolist(), mask, strict=True) if m]
        wanted = {
            "training_log_ppl": -mean(a),
            "training_ppl": math.exp(-mean(a)),
            "rollout_log_ppl": -mean(b),
            "rollout_ppl": math.exp(-mean(b)),
            "log_ppl_diff": mean(b) - mean(a),
            "log_ppl_abs_diff": abs(mean(b) - mean(a)),
            "ppl_ratio": math.exp(mean(b) - mean(a)),
            "chi2_token": mean([math.exp(2 * (x - y)) for x, y in zip(a, b, strict=True)]) - 1,
            "chi2_seq": math.exp(2 * (sum(a) - sum(b))) - 1,
        }
        for name, value in wanted.items():
            assert metrics[name][i].tolist() == pytest.approx([value] * len(mask), abs=1e-5), name
        for t in range(len(mask)):
            rho = float(train[i][t] - engine[i][t])
            assert float(metrics["kl"][i][t]) == pytest.approx(-rho, abs=1e-6)
            assert float(metrics["k3_kl"][i][t]) == pytest.approx(math.exp(rho) - rho - 1, abs=1e-5)


def test_equal_policies_have_weight_one_and_no_distance():
    weights, kept, metrics = compute_mis_weights(
        replace(PLAIN, use_rs=True, rs_veto_threshold=1e-4, tis_batch_normalize=True),
        train_log_probs=rows(1),
        rollout_log_probs=rows(1),
        loss_masks=masks(),
    )
    assert [w.tolist() for w in weights] == [[float(m) for m in mask] for mask in MASKS]
    assert [mask.tolist() for mask in kept] == MASKS
    for name in ("kl", "k3_kl", "log_ppl_diff", "chi2_token", "chi2_seq", "rs_catastrophic_seq_fraction"):
        assert all(float(row[0]) == 0.0 for row in metrics[name][:3]), name


def test_without_weights_only_the_masks_and_metrics_are_made():
    weights, _, metrics = compute_mis_weights(
        replace(PLAIN, use_tis=False), train_log_probs=rows(1), rollout_log_probs=rows(2), loss_masks=masks()
    )
    assert weights is None
    assert "tis_weight_before_bound" not in metrics
    assert "kl" in metrics


def test_missing_and_contradicting_settings_are_named():
    with pytest.raises(ValueError, match=r"must set use_rs, tis_level.*tis_batch_normalize"):
        MismatchSettings.of({"use_tis": True})
    assert MismatchSettings.of(vars(PLAIN) | {"other": 1}) == PLAIN
    with pytest.raises(ValueError, match=r"tis_lower_bound 2\.0 must be below tis_upper_bound 1\.5"):
        replace(PLAIN, tis_mode="clip", tis_lower_bound=2.0)
    with pytest.raises(ValueError, match=r"rs_lower_bound 3\.0"):
        replace(PLAIN, use_rs=True, rs_lower_bound=3.0)
    with pytest.raises(ValueError, match="geometric"):
        replace(PLAIN, tis_level="geometric", tis_batch_normalize=True)
    with pytest.raises(ValueError, match="tis_mode 'hard'"):
        replace(PLAIN, tis_mode="hard")


def test_a_drifted_sequence_is_dropped_only_where_its_advantage_is_negative():
    samples = Samples([3, 2], [torch.tensor([1, 1, 0]), torch.tensor([1, 1])], torch.tensor([2.0, 2.0]))
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    new = torch.tensor([-1.5, -1.3, -9.0, -0.9, -1.0])  # the masked token does not count: drift 0.4 and -0.05
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0])
    assert drifted_tokens(new, old, advantages, samples, 0.3).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert drifted_tokens(new, old, advantages, samples, 0.5).tolist() == [0.0] * 5


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("clip", [0.2, 1.0, 0.0])
def test_value_loss_gradient_and_metrics_equal_a_loop_over_tokens(clip, per_token):
    lengths, denominators = [len(mask) for mask in MASKS], [5.0, 5.0, 2.0, 0.0]
    g = torch.Generator().manual_seed(3)
    values = torch.randn(sum(lengths), generator=g).requires_grad_()
    old, returns = torch.randn(sum(lengths), generator=g), torch.randn(sum(lengths), generator=g)
    reduce = make_reducer(lengths, masks(), torch.tensor(denominators), per_token=per_token)
    out = value_loss(values, old, returns, clip, reduce)
    leaf = values.detach().double().requires_grad_()
    total, clipped, position = torch.zeros((), dtype=torch.float64), 0.0, 0
    for mask, denominator in zip(MASKS, denominators, strict=True):
        for m in mask:
            w = m * (1.0 if per_token else 1.0 / max(denominator, 1.0))
            v, v0, target = leaf[position], float(old[position]), float(returns[position])
            step = float(v.detach()) - v0
            bounded = v if abs(step) <= clip else torch.tensor(v0 + math.copysign(clip, step), dtype=torch.float64)
            both = (bounded - target) ** 2, (v - target) ** 2
            total = total + w * (both[0] if float(both[0].detach()) > float(both[1].detach()) else both[1])
            clipped += w * float(abs(step) > clip)
            position += 1
    total.backward()
    assert list(out.metrics) == ["value_loss", "value_clipfrac"]
    assert out.metrics["value_loss"].item() == pytest.approx(total.item(), abs=1e-5)
    assert out.metrics["value_clipfrac"].item() == pytest.approx(clipped, abs=1e-5)
    (grad,) = torch.autograd.grad(out.loss, values)
    torch.testing.assert_close(grad.double(), leaf.grad, atol=1e-5, rtol=1e-5)
