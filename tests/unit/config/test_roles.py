"""--megatron-config-path: the flags of a role, and the flags that the file cannot have."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import pytest

from slime.config.roles import check_roles, critic_args, read_roles, role_args
from slime.utils.errors import ConfigError
from tests.unit.config.tiny_command import TinyCommand


def namespace(path: str, **more: Any) -> Namespace:
    """The attributes that roles look at, resolved."""
    values = {
        "megatron_config_path": path, "lr": 1e-6, "save": "/out", "load": None, "save_hf": "/hf",
        "clip_grad": 1.0, "seed": 1234, "bf16": True,
        "min_lr": None, "kl_coef": 0.1, "use_opd": True, "custom_advantage_function_path": "a.b",
        "untie_embeddings_and_output_weights": False, "disable_param_buffers_cpu_backup": True, "nested": {"a": [1]},
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None, "sequence_parallel": False,
        "use_critic": False, "advantage_estimator": "grpo", "notices": [],
    }  # fmt: skip
    return Namespace(**(values | more))


@pytest.fixture
def write(command: TinyCommand):
    return lambda text: command.write("roles.yaml", text)


BOTH = """
megatron:
  - {name: default, role: actor, overrides: {lr: 2e-6}}
  - {name: default, role: critic, args: {lr: 1e-5, save: other, min-lr: 1e-7, num_nodes: 4}}
"""


def test_each_role_sees_its_own_values_and_the_original_stays(write):
    args = namespace(write(BOTH))
    actor, critic = role_args(args, "actor"), role_args(args, "critic")
    assert (args.lr, actor.lr, critic.lr) == (1e-6, 2e-6, 1e-5)
    assert (actor.save, critic.save, critic.min_lr) == ("/out", os.path.abspath("other"), 1e-7)
    assert not hasattr(critic, "num_nodes")
    actor.nested["a"].append(2)
    assert args.nested == {"a": [1]}


def test_a_critic_has_no_reference_no_teacher_and_its_own_output_layer(write):
    critic = role_args(namespace(write(BOTH)), "critic")
    assert (critic.kl_coef, critic.use_opd, critic.custom_advantage_function_path) == (0.0, False, None)
    assert critic.untie_embeddings_and_output_weights is True
    assert critic.disable_param_buffers_cpu_backup is False
    assert role_args(namespace(write(BOTH)), "actor").disable_param_buffers_cpu_backup is True


def test_without_a_file_the_critic_is_a_copy_that_is_backed_up():
    critic = role_args(namespace(None), "critic")  # type: ignore[arg-type]
    assert (critic.kl_coef, critic.disable_param_buffers_cpu_backup) == (0.1, False)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("lr: 1e-5", "lr", 1e-5),
        ("lr: 1", "lr", 1.0),
        ("seed: '7'", "seed", 7),
        ("bf16: 'false'", "bf16", False),
        ("bf16: false", "bf16", False),
        ("min_lr: 1e-7", "min_lr", 1e-7),
        ("advantage_estimator: '007'", "advantage_estimator", "007"),
        ("lr: fast", "lr", "fast"),
        ("untold: [1]", "untold", [1]),
    ],
)
def test_a_value_takes_the_type_of_what_it_replaces(text: str, name: str, value: Any, write):
    path = write(f"megatron: [{{role: actor, overrides: {{{text}}}}}]")
    result = getattr(role_args(namespace(path), "actor"), name)
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other: []", "the file must have a top-level 'megatron' list"),
        ("megatron: {role: actor}", "the file must have a top-level 'megatron' list"),
        ("megatron: [3]", "entry 1 must be a mapping with role and overrides"),
        ("megatron: [{overrides: {}}]", "entry 1: role None is not one of actor, critic"),
        ("megatron: [{role: teacher}]", "entry 1: role 'teacher' is not one of actor, critic"),
        ("megatron: [{role: actor, override: {}}]", "entry 1: unknown key override; known keys"),
        ("megatron: [{role: actor, overrides: [1]}]", "entry 1: overrides must be a mapping"),
        ("megatron: [{role: actor}, {role: actor}]", "entry 2: there is an entry for actor already"),
    ],
)
def test_a_wrong_file_names_flag_file_and_entry(text: str, message: str, write):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_roles(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--megatron-config-path {path}")
    assert isinstance(caught.value, AssertionError) is ("top-level" in message)  # which older callers catch


def test_roles_share_one_layout(write):
    text = "megatron: [{role: critic, overrides: {tensor_model_parallel_size: '4', sequence_parallel: false}}]"
    args = namespace(write(text), use_critic=True, save=None)
    (problem,) = check_roles(args)
    assert "critic: tensor_model_parallel_size 4 differs from --tensor-model-parallel-size 2" in problem


def test_two_roles_do_not_save_into_one_directory(write):
    args = namespace(write("megatron: [{role: critic, overrides: {save: /out}}]"), use_critic=True)
    (problem,) = check_roles(args)
    assert "critic: save /out is the actor's --save" in problem
    assert list(check_roles(namespace(write(BOTH), use_critic=True))) == []


def test_what_nothing_reads_is_a_warning(write):
    args = namespace(write("megatron: [{role: actor, overrides: {lrr: 1}}, {role: critic}]"))
    assert list(check_roles(args)) == []
    text = " ".join(str(notice) for notice in args.notices)
    assert "nothing that slime knows reads lrr" in text
    assert "grpo has no critic" in text


def test_the_file_is_checked_with_the_command(command: TinyCommand, write):
    path = write("megatron: [{role: teacher}]")
    assert f"--megatron-config-path {path}, entry 1: role 'teacher'" in command.run("--megatron-config-path", path)[1]


def test_the_critic_saves_below_the_actor_unless_it_has_a_directory_of_its_own(write):
    assert critic_args(namespace(write("megatron: [{role: actor}]"))).save == "/out/critic"
    assert critic_args(namespace(write(BOTH))).save == os.path.abspath("other")
    assert critic_args(namespace(write(BOTH))).lr == 1e-5


def test_the_critic_continues_from_its_own_checkpoint_or_starts_as_the_policy_did(write, tmp_path):
    args = namespace(write("megatron: [{role: actor}]"))
    (tmp_path / "old").mkdir()
    args.load = str(tmp_path / "old")
    assert critic_args(args).load is None  # the policy's checkpoint holds no critic
    (tmp_path / "old" / "critic").mkdir()
    assert critic_args(args).load == f"{args.load}/critic"
    args.load = args.save  # a run that resumes itself, and may not have begun
    assert critic_args(args).load == f"{args.save}/critic"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("lr", "abc", "is not a number"),
        ("lr", "[1]", "is not a number"),
        ("lr", "null", "is not a number"),
        ("seed", "1.5", "is not a whole number"),
        ("bf16", "maybe", "is neither true nor false"),
        ("save_hf", "3", "is not text"),
    ],
)
def test_a_value_of_another_type_than_the_flag_s_is_named(name: str, value: str, rule: str, write):
    path = write(f"megatron: [{{role: actor, overrides: {{{name}: {value}}}}}]")
    (problem,) = check_roles(namespace(path))
    assert problem.startswith(f"--megatron-config-path {path}: actor: {name}: ")
    assert rule in problem


def test_what_the_loop_follows_holds_for_all_roles(write):
    path = write("megatron: [{role: actor, overrides: {advantage_estimator: ppo}}]")
    (problem,) = check_roles(namespace(path))
    assert problem.endswith("advantage_estimator ppo holds for all roles: set --advantage-estimator instead.")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("lr: -1", "critic: --lr -1.0 must not be negative"),
        ("load: /nowhere", "critic: --load /nowhere: there is no such directory"),
        ("min_lr: 1", "critic: --min-lr 1.0 must not exceed --lr 1e-06"),
    ],
)
def test_a_role_s_values_obey_the_rules_of_the_trainer(overrides: str, problem: str, command: TinyCommand, write):
    path = write(f"megatron: [{{role: critic, overrides: {{{overrides}}}}}]")
    _, problems = command.run("--megatron-config-path", path, "--advantage-estimator", "ppo")
    assert problem in problems


def test_what_the_command_line_breaks_is_not_told_again_for_each_role(command: TinyCommand, write):
    path = write("megatron: [{role: actor, overrides: {lr: 1e-5}}]")
    _, problems = command.run("--megatron-config-path", path, "--adam-beta1", 2)
    assert problems == "--adam-beta1 2.0 must be at least 0 and below 1."
