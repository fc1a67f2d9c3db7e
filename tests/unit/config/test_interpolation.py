"""${...} inside YAML files."""

from typing import Any

import pytest

from slime.config.yaml_file import interpolate
from slime.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${eval.top_p}", 0.7),
        ("p=${eval.top_p}!", "p=0.7!"),
        ("${list.1.a}", 5),
        ("${indirect}", 0.7),
        ("${eval}", {"top_p": 0.7}),
        ("${oc.env:SLIME_TEST_DIR}/x", "/data/x"),
        ("${oc.env:SLIME_TEST_NOTHING,/other}/x", "/other/x"),
        ("${oc.env:SLIME_TEST_NOTHING,null}", None),
        ("${oc.env:SLIME_TEST_NOTHING,${dir}/y}/x", "/base/y/x"),
        ("${${name}.top_p}", 0.7),
        ("${list[1].a}", 5),
        ("${.beside}", 9),
        ("${..0.beside}", 9),
        ("${..[0].beside}", 9),
        ("${...dir}", "/base"),
        ("${beside_it}", {"of": 3}),
        ("$5 {plain}", "$5 {plain}"),
    ],
)
def test_a_reference_becomes_what_it_refers_to(text: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIME_TEST_DIR", "/data")
    root = {"eval": {"top_p": 0.7}, "list": [1, {"a": 5}], "indirect": "${eval.top_p}", "dir": "/base", "name": "eval"}
    root |= {"beside_it": {"of": "${..list.1.next}"}, "x": [{"y": text, "beside": 9}]}
    root["list"][1]["next"] = "${...n}"  # relative to its own place, not to that of the reference
    root["n"] = 3
    assert interpolate(root, "f")["x"][0]["y"] == value


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"a": "${b.c}"}, r"f: \$\{b.c\} leads nowhere: there is no 'b'"),
        ({"a": "${b}", "b": "${a}"}, r"refers to itself \(b -> a -> b\)"),
        ({"a": {"b": "${.b}"}}, r"refers to itself"),
        ({"a": "${.b}"}, "there is no 'b'"),
        ({"a": "x${oc.env:SLIME_TEST_LOOP}"}, "has a reference itself"),
        ({"a": "${oc.env:SLIME_TEST_NOTHING}"}, "no environment variable SLIME_TEST_NOTHING"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named(root: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIME_TEST_LOOP", "y${oc.env:SLIME_TEST_LOOP}")
    with pytest.raises(ConfigError, match=message):
        interpolate(root, "f")
