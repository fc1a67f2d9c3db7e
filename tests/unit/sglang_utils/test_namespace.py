"""``--sglang-*`` and ``--router-*``: types, choices, old names, and what reaches the two processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slime.backends.sglang_utils import option_table
from slime.backends.sglang_utils.arguments import EngineArgs
from slime.backends.sglang_utils.namespace import read_engine
from slime.backends.sglang_utils.option_table import Option, router_options, server_options
from slime.config.arguments import CommandArgs
from slime.config.parse import EngineNamespace, parse

OWN = {"--sglang-router-ip", "--sglang-config", "--lr"}


def read(line: str) -> EngineNamespace:
    return read_engine(line.split(), OWN)


def only_problem(line: str) -> str:
    (problem,) = read(line).problems
    return problem


def test_words_that_are_not_the_engines_stay_in_order():
    names = read(
        "--lr 1 --sglang-page-size 2 --sglang-router-ip h --flag a b --router-policy random --worker-urls u v c"
    )
    assert names.rest == ["--lr", "1", "--sglang-router-ip", "h", "--flag", "a", "b"]
    assert names.argv == ["--page-size", "2"]
    assert names.router_argv == ["--router-policy", "random", "--worker-urls", "u", "v", "c"]
    assert names.given == {"sglang_page_size", "router_policy", "worker_urls"}


@pytest.mark.parametrize(
    ("line", "name", "value", "argv"),
    [
        ("--sglang-mem-fraction-static=0.4", "sglang_mem_fraction_static", 0.4, "--mem-fraction-static 0.4"),
        ("--sglang-context-length 8k", "sglang_context_length", 8000, "--context-length 8k"),
        ("--sglang-context-length 2Ki", "sglang_context_length", 2048, "--context-length 2Ki"),
        ("--sglang-chunked-prefill-size -1", "sglang_chunked_prefill_size", -1, "--chunked-prefill-size=-1"),
        ("--sglang-chunked-prefill-size=-1", "sglang_chunked_prefill_size", -1, "--chunked-prefill-size=-1"),
        ("--sglang-enable-metrics", "sglang_enable_metrics", True, "--enable-metrics"),
        ("--sglang-enable-metrics --no-sglang-enable-metrics", "sglang_enable_metrics", False, ""),
        (
            "--no-sglang-enable-dsa-fused-indexer",
            "sglang_enable_dsa_fused_indexer",
            False,
            "--no-enable-dsa-fused-indexer",
        ),
        ("--sglang-data-parallel-size 2", "sglang_dp_size", 2, "--data-parallel-size 2"),
        ("--sglang-data-parallel-size 2", "sglang_data_parallel_size", 2, "--data-parallel-size 2"),
        ("--sglang-dp-size 3 --sglang-data-parallel-size 2", "sglang_dp_size", 2, "--data-parallel-size 2"),
        (
            '--sglang-preferred-sampling-params {"top_k":3}',
            "sglang_preferred_sampling_params",
            {"top_k": 3},
            '--preferred-sampling-params {"top_k":3}',
        ),
        ("--sglang-quantization-param-path None", "sglang_quantization_param_path", None, None),
        ("--sglang-log-level INFO", "sglang_log_level", "INFO", "--log-level INFO"),
        ("--sglang-cuda-graph-bs-decode 1 2 8", "sglang_cuda_graph_bs_decode", [1, 2, 8], None),
    ],
)
def test_an_option_has_the_servers_type_and_reaches_it_as_it_was_said(line, name, value, argv):
    names = read(line)
    assert names.problems == []
    assert names.attributes[name] == value
    if argv is not None:
        assert " ".join(names.argv) == argv


def test_every_field_of_the_server_is_an_attribute_with_its_default():
    attributes = read("").attributes
    assert attributes["sglang_mem_fraction_static"] is None
    assert attributes["sglang_max_prefill_tokens"] == 16384
    assert attributes["sglang_enable_dp_attention"] is False
    assert attributes["sglang_watermark_context_window"] == 4  # has no option
    assert attributes["sglang_tp_size"] == attributes["sglang_tensor_parallel_size"] == 1
    assert len([name for name in attributes if name.startswith("sglang_")]) > 500


def test_the_routers_attributes_have_slimes_defaults():
    attributes = read("").attributes
    assert (attributes["router_log_level"], attributes["router_policy"]) == ("warn", "cache_aware")
    assert (attributes["router_balance_abs_threshold"], attributes["router_balance_rel_threshold"]) == (10, 1.2)
    assert attributes["worker_urls"] == []
    assert read("").router_argv == []


def test_repeated_options_add_up_where_the_router_collects_them():
    names = read("--router-prefill http://a 9000 --router-prefill http://b")
    assert names.attributes["router_prefill"] == [["http://a", "9000"], ["http://b"]]
    assert names.router_argv == ["--router-prefill", "http://a", "9000", "--router-prefill", "http://b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--sglang-page-size x", "--sglang-page-size: 'x' is not an integer."),
        ("--sglang-mem-fraction-static 40%", "--sglang-mem-fraction-static: '40%' is not a number."),
        (
            "--sglang-context-length 1.5Ki",
            "--sglang-context-length: '1.5Ki' is not an integer such as 4096 or 4k.",
        ),
        ("--sglang-page-size", "--sglang-page-size: needs a value."),
        ("--sglang-page-size 1 2", "--sglang-page-size: takes one value, got 1 2."),
        ("--sglang-enable-metrics yes", "--sglang-enable-metrics: takes no value, got yes."),
        ("--sglang-cuda-graph-bs-decode", "--sglang-cuda-graph-bs-decode: needs at least one value."),
        ("--no-sglang-page-size", "--no-sglang-page-size: needs a value."),
        ("--no-sglang-page-size 1", "--no-sglang-page-size: is not a switch, so there is nothing to turn off."),
        ("--sglang-tokenizer-mode sloww", "--sglang-tokenizer-mode sloww is not one of auto, slow. Did you mean slow?"),
    ],
)
def test_a_bad_option_is_one_sentence(line: str, message: str):
    assert only_problem(line) == message


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "--sglang-mem-fraction-statc 0.4",
            "unknown flag, ignored with its values: the installed SGLang server has no --mem-fraction-statc; "
            "did you mean --sglang-mem-fraction-static?",
        ),
        ("--sglang-zzz 1 2", "unknown flag, ignored with its values: the installed SGLang server has no --zzz"),
        (
            "--router-polcy random",
            "unknown flag, ignored with its values: the installed router has no --router-polcy; "
            "did you mean --router-policy?",
        ),
        ("--sglang-port 3", "dropped: it is chosen by slime among the free ones"),
        ("--sglang-model /m", "dropped: it follows from --hf-checkpoint"),
        ("--sglang-random-seed 1", "dropped: it follows from --seed"),
        ("--router-pd-disaggregation", "dropped: it follows from --prefill-num-servers or --sglang-config"),
    ],
)
def test_a_flag_that_the_engines_cannot_take_is_dropped_with_a_warning(line: str, text: str):
    names = read(line)
    (notice,) = names.notices
    assert (notice.level, notice.flag, notice.text) == ("warning", line.split(maxsplit=1)[0], text)
    assert (names.problems, names.argv, names.router_argv, names.rest) == ([], [], [], [])


def test_a_yaml_file_sets_the_same_options_and_flags_beat_it(tmp_path):
    path = tmp_path / "args.yaml"
    path.write_text(
        "sglang_cuda_graph_bs_decode: [1, 2]\nsglang_enable_metrics: false\nsglang_page_size: 4\n"
        "sglang_preferred_sampling_params: {top_k: 3}\nrouter_policy: random\nsglang_server_concurrency: 7\n"
    )
    argv = ["--custom-config-path", str(path), "--sglang-page-size", "8"]
    args = parse(argv, [EngineArgs, CommandArgs], read_engine=read_engine)
    assert (args.sglang_cuda_graph_bs_decode, args.sglang_enable_metrics, args.sglang_page_size) == ([1, 2], False, 8)
    assert (args.sglang_preferred_sampling_params, args.router_policy) == ({"top_k": 3}, "random")
    assert (args.sglang_server_concurrency, args.sglang_dp_size) == (7, 1)
    assert args.router_argv == ["--router-policy", "random"]
    assert args.sglang_argv == [
        *("--cuda-graph-bs-decode", "1", "2", "--preferred-sampling-params", '{"top_k": 3}', "--page-size", "8"),
    ]


def test_every_bad_option_is_reported():
    assert len(read("--sglang-page-size x --sglang-dtype z --router-policy y").problems) == 3


def test_a_long_list_of_choices_is_cut():
    problem = only_problem("--sglang-attention-backend fa33")
    assert "and" in problem
    assert "more. Did you mean fa3?" in problem
    assert len(problem) < 300


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--sglang-cuda-graph-bs 1 2 4 8", "--cuda-graph-bs-decode 1 2 4 8"),
        ("--sglang-cuda-graph-max-bs 8", "--cuda-graph-max-bs-decode 8"),
        ("--sglang-nsa-decode-backend fa3", "--dsa-decode-backend fa3"),
        ("--sglang-fp8-gemm-runner-backend triton", "--fp8-gemm-backend triton"),
    ],
)
def test_a_renamed_option_reaches_the_server_under_its_name_of_today(old: str, new: str):
    names = read(old)
    assert (" ".join(names.argv), names.problems) == (new, [])
    (notice,) = names.notices
    assert notice.level == "info"


@pytest.mark.parametrize("flag", [*option_table.REMOVED])
def test_an_option_that_is_gone_is_dropped_with_its_values_and_a_warning(flag: str):
    names = read(f"--sglang-{flag[2:]} 1")
    assert (names.argv, names.problems, names.rest) == ([], [], [])
    assert [notice.level for notice in names.notices] == ["warning"]
    assert flag not in server_options().by_flag


def test_what_is_always_on_is_dropped_with_a_warning():
    names = read("--sglang-trust-remote-code --sglang-skip-server-warmup")
    assert names.argv == []
    assert names.problems == []
    assert len(names.notices) == 2


def test_the_routers_own_watching_of_engines_is_said_to_have_no_effect():
    (notice,) = read("--router-health-check-interval-secs 3").notices
    assert notice.level == "warning"
    assert "no effect" in notice.text


def test_the_tensor_parallel_size_is_noted_and_left_to_slime():
    names = read("--sglang-tensor-parallel-size 2")
    assert names.attributes["sglang_tp_size"] == 2
    assert (names.argv, names.given) == ([], {"sglang_tp_size"})


def test_tables_mention_no_option_twice_and_controlled_ones_exist():
    table = server_options()
    dests = {option.dest for option in table.by_flag.values()}
    assert set(option_table.CONTROLLED) <= dests
    assert set(option_table.RENAMED.values()) <= set(table.by_flag)
    assert len({flag for flag in router_options().by_flag if flag.startswith("--")}) == 96


def test_reading_the_options_imports_no_engine():
    code = (
        "from slime.backends.sglang_utils.namespace import read_engine; import sys; "
        "read_engine(['--sglang-page-size', '1'], ()); "
        "print({'sglang', 'sglang_router', 'torch', 'ray', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch):
    server_options.cache_clear()
    monkeypatch.setattr(option_table, "_installed", lambda package: "0.9.9")
    yield monkeypatch
    server_options.cache_clear()


def test_with_another_version_the_source_decides_which_options_exist(other_version):
    known = {"--page-size", "--brand-new"}
    other_version.setattr(option_table, "_names_in_source", lambda: known)
    names = read("--sglang-page-size 4 --sglang-brand-new 1 --sglang-dtype half")
    assert names.argv == ["--page-size", "4", "--brand-new", "1"]
    assert names.attributes["sglang_brand_new"] == 1
    assert "--sglang-dtype" in [notice.flag for notice in names.notices]
    assert any("0.9.9 is installed" in notice.text for notice in names.notices)


def test_the_names_in_the_source_are_those_of_the_table():
    source = option_table._names_in_source()
    table = {flag for flag in server_options().by_flag if not flag.startswith("--no-")}
    assert table <= source


def test_an_unknown_kind_of_option_is_our_mistake():
    with pytest.raises(AssertionError):
        Option(("--x",), "x", "odd").value_of([])
