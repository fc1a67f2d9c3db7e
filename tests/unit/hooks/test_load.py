from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.config.groups import flags_of
from slime.hooks import accepted_kwargs, accepts, can_be_called, check_hooks, load_function
from slime.hooks.protocols import HOOKS
from slime.ray.arguments import GROUPS
from slime.utils.errors import ConfigError


@pytest.fixture
def user_file(tmp_path):
    def write(text, name="custom.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_all_four_spellings_find_the_same_function(user_file, monkeypatch, tmp_path):
    path = user_file("def only(args, sample):\n    return 1\n", "custom_spelling.py")
    monkeypatch.syspath_prepend(tmp_path)
    from_file = load_function(f"{path}:only")
    assert load_function(path) is from_file
    assert load_function("custom_spelling:only") is load_function("custom_spelling.only")
    monkeypatch.chdir(tmp_path)
    load_function.cache_clear()
    assert load_function("custom_spelling.py:only") is from_file, "a file is loaded once, however it is written"


@pytest.mark.parametrize(
    ("role", "group_rm", "found"),
    [
        ("generate", False, "generate"),
        ("reward", False, "reward_func"),
        ("reward", True, "batched_custom_rm"),
        ("rollout", False, "generate_rollout"),
    ],
)
def test_a_bare_file_is_searched_for_the_names_of_its_role(user_file, role, group_rm, found):
    names = ("generate", "reward_func", "batched_custom_rm", "generate_rollout", "helper")
    path = user_file("".join(f"def {name}(): pass\n" for name in names), f"{role}_{group_rm}.py")
    assert load_function(path, role, group_rm=group_rm).__name__ == found
    with pytest.raises(ConfigError, match="Candidates: batched_custom_rm, generate, generate_rollout, helper"):
        load_function(path, "other")


@pytest.mark.parametrize(
    ("path", "fragment"),
    [
        ("nodots", "names no function"),
        ("no.such.module", "'no.such'"),
        ("json.dumpz", "json has no 'dumpz'"),
        ("gone.py:f", "there is no file gone.py"),
    ],
)
def test_paths_that_lead_nowhere_say_which_part_failed(path, fragment):
    with pytest.raises(ConfigError, match=fragment):
        load_function(path)


def test_an_error_inside_the_users_file_is_shown(user_file):
    with pytest.raises(ConfigError, match=r"broken\.py cannot be imported: ZeroDivisionError"):
        load_function(user_file("1 / 0\n", "broken.py"))


def test_hooks_are_checked_at_start_up_all_at_once(user_file):
    path = user_file(
        "def generate(args, sample, sampling_params): pass\n"
        "def rollout(args, rollout_id): pass\n"
        "def reward(args, sample, **kwargs): pass\n"
        "class NoReward: pass\n"
        "value = 3\n",
        "check.py",
    )
    args = SimpleNamespace(
        rollout_function_path=f"{path}:rollout",
        custom_rm_path=f"{path}:reward",
        custom_generate_function_path=f"{path}:generate",
        dynamic_sampling_filter_path=f"{path}:value",
        rollout_sample_hook_path=[f"{path}:reward", f"{path}:gone"],
        buffer_filter_path=None,
    )
    problems = check_hooks(args)
    assert [problem.split()[0] for problem in problems] == [
        "--rollout-function-path", "--dynamic-sampling-filter-path", "--rollout-sample-hook-path",
    ]  # fmt: skip
    assert "signature is (args, rollout_id)" in problems[0]
    assert "RolloutFunction" in problems[0]
    assert "is a int, not a function" in problems[1]
    assert "has no 'gone'" in problems[2]
    args = SimpleNamespace(custom_rm_path=f"{path}:NoReward")
    assert "needs a method compute_reward" in check_hooks(args)[0]


@pytest.mark.parametrize("parameters", ["args", "args, sample", "args, sample, *, evaluation"])
def test_a_generate_function_with_no_room_for_its_arguments_is_refused(user_file, parameters):
    path = user_file(f"def f({parameters}): pass\n", f"narrow{len(parameters)}.py")
    (problem,) = check_hooks(SimpleNamespace(custom_generate_function_path=f"{path}:f"))
    assert "(args, sample, sampling_params, evaluation) or (args, samples, sampling_params, evaluation)" in problem


@pytest.mark.parametrize(
    ("dest", "parameters"),
    [
        ("custom_generate_function_path", "args, sample, sampling_params, evaluation"),
        ("custom_generate_function_path", "args, sample, sampling_params, *, evaluation"),
        ("custom_generate_function_path", "args, samples, sampling_params, evaluation"),
        ("custom_generate_function_path", "args, samples, *, sampling_params"),
        ("rollout_sample_hook_path", "args, sample, *, rollout_id"),
        ("rollout_sample_hook_path", "args, sample, evaluation"),
        ("custom_rm_path", "args, prompts, responses, labels, samples"),
        ("custom_rm_path", "prompts, responses, *, metadata"),
    ],
)
def test_a_parameter_that_is_passed_by_its_name_may_lack_a_default(user_file, dest, parameters):
    path = user_file(f"async def f({parameters}): pass\n", "named.py") + ":f"
    value = [path] if dest == "rollout_sample_hook_path" else path
    assert check_hooks(SimpleNamespace(**{dest: value})) == []


@pytest.mark.parametrize("options", ["", "(frozen=True)"])
def test_a_hook_may_be_an_object_that_cannot_be_hashed(user_file, options):
    path = user_file(
        "from dataclasses import dataclass, field\n"
        f"@dataclass{options}\n"
        "class Grader:\n"
        "    words: list = field(default_factory=list)\n"
        "    def __call__(self, args, sample, **kwargs): return 1.0\n"
        "    def wrong(self): pass\n"
        "grade = Grader()\n",
        f"grader{len(options)}.py",
    )
    assert check_hooks(SimpleNamespace(custom_rm_path=f"{path}:grade")) == []
    (problem,) = check_hooks(SimpleNamespace(dynamic_sampling_filter_path=f"{path}:Grader"))
    assert "is called with (args, samples)" in problem


def test_the_functions_that_slime_uses_by_default_pass_the_check():
    from slime.data.arguments import PromptDataArgs
    from slime.rollout.arguments import GenerationArgs

    assert check_hooks(SimpleNamespace(**vars(GenerationArgs()), **vars(PromptDataArgs()))) == []


def test_every_hook_names_its_flag_and_documents_its_protocol():
    assert len({hook.dest for hook in HOOKS}) == len(HOOKS)
    for hook in HOOKS:
        assert hook.flag.startswith("--")
        assert hook.protocol.__doc__


_FILES = {"custom_config_path", "lora_adapter_path", "megatron_config_path", "memory_snapshot_path"}
"""Flags that name a file or a directory."""


def test_every_flag_that_names_a_function_is_checked_at_the_start():
    flags = [flag for flag in flags_of(GROUPS) if not flag.no_effect and not flag.later]
    named = {flag.name for flag in flags if flag.name.endswith("_path")} - _FILES
    named |= {flag.name for flag in flags if flag.help.startswith(("Function ", "Class "))}
    assert named == {hook.dest for hook in HOOKS}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.dest)
def test_a_function_that_cannot_be_called_is_a_problem_whichever_flag_names_it(hook, user_file):
    path = user_file("def f(*, nothing_of_this_name_is_passed): pass\n", f"{hook.dest}.py")
    for wrong in (f"{path}:f", f"{path}:gone"):
        (problem,) = check_hooks(SimpleNamespace(**{hook.dest: wrong}))
        assert problem.startswith(f"{hook.flag} {wrong}")


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.dest)
def test_only_functions_whose_result_is_awaited_may_be_async(hook, user_file):
    path = user_file("async def f(*args, **kwargs): pass\n", f"async_{hook.dest}.py") + ":f"
    problems = check_hooks(SimpleNamespace(**{hook.dest: path}))
    awaited = {"custom_generate_function_path", "custom_rm_path", "rollout_sample_hook_path"}
    assert problems == [] if hook.dest in awaited else "not awaited" in problems[0]


def test_a_model_provider_gets_the_arguments_that_it_takes(user_file):
    text = "def upstream(pre_process=True, post_process=True, vp_stage=None): pass\ndef own(config, args): pass\n"
    path = user_file(text, "provider.py")
    for name in ("upstream", "own"):
        assert check_hooks(SimpleNamespace(custom_model_provider_path=f"{path}:{name}")) == []


def test_signature_questions():
    def f(a, b=1, *, c=2):
        pass

    def g(a, **kwargs):
        pass

    assert accepts(f, "c")
    assert not accepts(g, "kwargs")
    assert accepted_kwargs(f, {"c": 1, "d": 2}) == {"c": 1}
    assert accepted_kwargs(g, {"d": 2}) == {"d": 2}
    assert can_be_called(f, ("x", "y", "*c"))
    assert not can_be_called(f, ("x", "y", "z"))
