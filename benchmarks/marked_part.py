"""The part of a page that a benchmark writes, between two marks, which are comments of the page."""

from __future__ import annotations


def with_part(page: str, text: str, marks: tuple[str, str], part: str) -> str:
    """``text`` with ``part`` between its marks.

    Args:
        page: its name, for the error.

    Raises:
        SystemExit: the page does not have both marks, once each and in this order.
    """
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    # A second pair of marks would keep an outdated table on the page.
    if not begin or not end or marks[0] in rest or marks[1] in before + after:
        raise SystemExit(f"{page} needs the lines {marks[0]} and {marks[1]}, once each: the part comes between them.")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"
