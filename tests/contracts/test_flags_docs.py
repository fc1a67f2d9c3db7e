"""docs/flags.md matches the argument groups."""

from tools.make_flags_docs import PAGE, page


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/make_flags_docs.py"


def test_the_page_names_what_is_missing_and_what_is_ignored():
    _, later = page().split("## Not supported yet")
    later, ignored = later.split("## Accepted without effect")
    assert "`--qk-clip`" in later
    assert "`--http-proxy`" in ignored
