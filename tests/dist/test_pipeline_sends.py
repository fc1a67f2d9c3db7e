"""Interleaved pipeline stages continue while they send. Their data arrives even if it leaves late."""

from __future__ import annotations

from tests.dist.ranks import ForkServer


def test_an_output_given_up_before_it_is_sent_arrives_as_it_was(ranks: ForkServer) -> None:
    _, received = ranks.run("tests.dist.pipeline_cases:send_and_give_up", 2)
    assert received == [7.0]
