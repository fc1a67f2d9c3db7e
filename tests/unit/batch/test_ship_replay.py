"""The inputs of the ranks, and rollouts on disk."""

from __future__ import annotations

import io
import logging
import resource

import pytest
import torch

from slime.batch.arguments import BatchArgs, ReplayArgs
from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.batch.schedule import MicroBatchArgs, ParallelLayout
from slime.batch.ship import split_by_dp, tensorize
from slime.data import dump_file
from slime.data.columns import COLUMNS, SAMPLING_SETS, TOKEN_VALUES, TRAINER_VALUES, USER_LOSS_VALUES, column
from slime.data.dump_file import load_debug_rollout_data, save_debug_rollout_data, save_debug_train_data
from slime.data.sample import Sample
from slime.utils.errors import ConfigError, DataError


def make_samples(n: int) -> list[Sample]:
    return [
        Sample(
            group_index=i // 2,
            index=i,
            tokens=[1, 2, *range(i + 1)],
            response_length=i + 1,
            reward=float(i % 3),
            rollout_log_probs=[-0.1 * i] * (i + 1),
            weight_versions=[str(i)],
            status=Sample.Status.COMPLETED,
            metadata={"row": i},
        )
        for i in range(n)
    ]


def compiled(n: int):
    return compile_train_data(make_samples(n), rewards=RewardArgs(n_samples_per_prompt=2))


def test_each_rank_gets_its_samples_with_the_dtypes_of_the_table():
    data = compiled(8)
    data["my_column"] = [f"row {i}" for i in range(8)]  # added by a hook
    data["my_note"] = "for everybody"
    out = split_by_dp(data, layout=ParallelLayout(2), global_batch_size=4, settings=MicroBatchArgs(micro_batch_size=2))
    assert out.num_dropped_samples == 0
    assert out.plan.partitions == [[0, 1, 4, 5], [2, 3, 6, 7]]
    for rank, partition in enumerate(out.plan.partitions):
        batch = out.ranks[rank]
        assert batch["partition"] == partition
        assert batch["micro_batch_indices"] == [[0, 1], [2, 3]]
        assert batch["num_microbatches"] == [1, 1]
        assert batch["global_batch_sizes"] == [4, 4]
        assert [t.tolist() for t in batch["tokens"]] == [data["tokens"][p] for p in partition]
        assert {t.dtype for t in batch["tokens"]} == {torch.int64}
        assert {t.dtype for t in batch["loss_masks"]} == {torch.int32}
        assert {t.dtype for t in batch["rollout_log_probs"]} == {torch.float32}
        assert batch["rollout_mask_sums"].tolist() == [p + 1.0 for p in partition]
        assert batch["rollout_mask_sums"].dtype == torch.float32
        assert batch["total_lengths"] == [p + 3 for p in partition]
        assert batch["sample_indices"] == partition
        assert batch["weight_versions"] == [[str(p)] for p in partition]
        assert batch["raw_reward"] == data["raw_reward"]  # the whole batch
        assert batch["my_column"] == [f"row {p}" for p in partition]
        assert batch["my_note"] == "for everybody"


def test_trailing_rollouts_are_counted_and_reported(caplog):
    with caplog.at_level(logging.WARNING):
        out = split_by_dp(compiled(7), layout=ParallelLayout(1), global_batch_size=3, settings=MicroBatchArgs())
    assert out.num_dropped_samples == 1
    assert out.plan.num_dropped_rollouts == 1
    assert "1 trailing rollouts (1 of 7 samples) do not fill a step of --global-batch-size 3" in caplog.text


@pytest.mark.parametrize(("cp_size", "is_told"), [(1, True), (2, False)])
def test_samples_above_the_token_budget_are_told(caplog, cp_size, is_told):
    settings = MicroBatchArgs(use_dynamic_batch_size=True, max_tokens_per_gpu=8)
    split_by_dp(compiled(8), layout=ParallelLayout(1, cp_size=cp_size), global_batch_size=8, settings=settings)
    told = "2 samples, the longest of 10 tokens, exceed --max-tokens-per-gpu 8 x --context-parallel-size 1"
    assert (told in caplog.text) is is_told


def test_a_view_does_not_carry_the_storage_of_the_whole_rollout():
    big = torch.zeros(1_000_000)
    batch = tensorize({"rollout_log_probs": [big[:3]]})
    file = io.BytesIO()
    torch.save(batch, file)
    assert file.tell() < 10_000
    assert batch["rollout_log_probs"][0].data_ptr() != big.data_ptr()


def test_the_lists_of_columns_are_those_of_the_table():
    for name, item in COLUMNS.items():
        assert name == item.name
        assert item.form in ("ragged", "vector") or not item.dtype
        assert item.form != "vector" or item.dtype
        assert (item.form == "ragged") == bool(item.axis)
        assert not item.dtype or isinstance(getattr(torch, item.dtype), torch.dtype)
        assert not item.sample_field or hasattr(Sample(), item.sample_field)
        assert not (item.required and item.sample_field)
    assert set(TRAINER_VALUES) | set(USER_LOSS_VALUES) == set(TOKEN_VALUES)
    assert SAMPLING_SETS == ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    assert not column("of_a_hook").required
    assert column("of_a_hook").per == "sample"


def test_a_dump_comes_back_as_it_was_and_trains_the_same(tmp_path):
    template = str(tmp_path / "deep" / "{rollout_id}.pt")
    samples = make_samples(6)
    samples[0].trace_id = "set by a plugin"
    path = save_debug_rollout_data(template, [samples[:2], [samples[2:4], samples[4:]]], rollout_id=3, evaluation=False)
    assert path == tmp_path / "deep" / "3.pt"
    assert [p.name for p in path.parent.iterdir()] == ["3.pt"]
    payload = torch.load(path, weights_only=True)  # nothing in it needs code to be loaded
    assert payload["rollout_id"] == 3
    loaded = load_debug_rollout_data(template, rollout_id=3)
    assert [s.to_dict() for s in loaded] == [s.to_dict() for s in samples]
    assert loaded[0].trace_id == "set by a plugin"
    rewards = RewardArgs(n_samples_per_prompt=2)
    again, before = (compile_train_data(rows, rewards=rewards) for rows in (loaded, samples))
    for data in (again, before):
        data["loss_masks"] = [mask.tolist() for mask in data["loss_masks"]]
    assert again == before


def test_evaluations_are_dumped_under_their_own_name_with_all_data_sets(tmp_path):
    data = {"a": {"samples": make_samples(2), "rewards": []}, "b": {"samples": make_samples(1)}}
    path = save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), data, rollout_id=0, evaluation=True)
    assert path.name == "eval_0.pt"
    assert len(torch.load(path, weights_only=True)["samples"]) == 3
    with pytest.raises(DataError, match="evaluation of a returned no samples"):
        save_debug_rollout_data(str(path), {"a": {"rewards": []}}, rollout_id=0, evaluation=True)


def test_no_template_writes_nothing():
    assert save_debug_rollout_data(None, [], rollout_id=0, evaluation=False) is None


def test_a_dump_with_objects_of_user_code_is_loaded_with_a_warning(tmp_path, caplog):
    sample = make_samples(1)[0]
    sample.metadata["set"] = frozenset({1, 2})
    template = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout_data(template, [sample], rollout_id=0, evaluation=False)
    with caplog.at_level(logging.WARNING):
        assert load_debug_rollout_data(template, rollout_id=0)[0].metadata["set"] == {1, 2}
    assert "runs that code" in caplog.text


@pytest.mark.parametrize(("ratio", "kept"), [(1.0, [0, 1, 2, 3, 4, 5]), (0.5, [0, 4, 5]), (0.34, [0, 5]), (0.01, [5])])
def test_a_subsample_keeps_both_ends(tmp_path, ratio, kept):
    template = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout_data(template, make_samples(6), rollout_id=0, evaluation=False)
    loaded = load_debug_rollout_data(template, rollout_id=0, subsample_ratio=ratio)
    assert [s.index for s in loaded] == kept


def test_bad_dumps_and_templates_name_the_flag_and_the_file(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    with pytest.raises(DataError, match=r"--load-debug-rollout-data: there is no file .*/4\.pt"):
        load_debug_rollout_data(template, rollout_id=4)
    for content in (b"", b"not a dump at all", b"PK\x03\x04broken"):
        (tmp_path / "5.pt").write_bytes(content)
        with pytest.raises(DataError, match=r"--load-debug-rollout-data: .*/5\.pt is not a rollout dump"):
            load_debug_rollout_data(template, rollout_id=5)
    for payload in ([1, 2], {"samples": 3}, {"samples": [{"index": 1}]}):
        torch.save(payload, tmp_path / "6.pt")
        with pytest.raises(DataError, match="is not a rollout dump"):
            load_debug_rollout_data(template, rollout_id=6)
    with pytest.raises(ConfigError, match=r"the only placeholder is \{rollout_id\}"):
        load_debug_rollout_data("{rank}.pt", rollout_id=0)
    save_debug_rollout_data(template, make_samples(2), rollout_id=0, evaluation=False)
    with pytest.raises(ConfigError, match="subsample 0"):
        load_debug_rollout_data(template, rollout_id=0, subsample_ratio=0.0)


def test_a_full_disk_costs_the_dumps_and_not_the_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(dump_file, "_warned", set())
    template, sample = str(tmp_path / "d" / "{rollout_id}.pt"), Sample(tokens=list(range(50_000)))
    train = {"tokens": [torch.arange(50_000)], "partition": [0]}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a file takes no more, as on a disk that is full
    try:
        for rollout_id in range(2):
            assert save_debug_rollout_data(template, [[sample]], rollout_id=rollout_id, evaluation=False) is None
        assert save_debug_train_data(template, rollout_id=7, rollout_data=train, group=None) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "d").iterdir()) == []
    first, second = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"--save-debug-rollout-data: {tmp_path}/d/0.pt was not written, the run goes on" in first
    assert "bytes" in first
    assert f"--save-debug-train-data: {tmp_path}/d/7.pt was not written" in second
    assert save_debug_rollout_data(template, [[sample]], rollout_id=3, evaluation=False) == tmp_path / "d" / "3.pt"


def test_a_failed_dump_leaves_nothing_behind(tmp_path):
    sample = make_samples(1)[0]
    sample.metadata["f"] = lambda: None
    with pytest.raises(Exception, match="pickle"):
        save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), [sample], rollout_id=0, evaluation=False)
    assert list(tmp_path.iterdir()) == []


def test_the_settings_are_read_from_the_flags():
    from argparse import ArgumentParser

    from slime.algorithms.arguments import AlgorithmArgs
    from slime.config.groups import add_group, from_args

    parser = ArgumentParser()
    for group in (BatchArgs, ReplayArgs, AlgorithmArgs):
        add_group(parser, group)
    parser.set_defaults(micro_batch_size=3, reward_key=None, n_samples_per_prompt=8)
    args = parser.parse_args(
        ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "64", "--disable-grpo-std-normalization"]
    )
    assert from_args(MicroBatchArgs, args) == MicroBatchArgs(3, True, 64, False, False)
    rewards = from_args(RewardArgs, args)
    assert rewards.is_centered
    assert not rewards.is_scaled
