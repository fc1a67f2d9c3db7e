"""Functions that the end-to-end tests pass to train.py the way a user passes theirs."""

import time


async def share_of_sevens(args, sample, **kwargs):
    """A reward any model can climb: how much of the response is the digit 7."""
    text = sample.response.strip()
    return text.count("7") / max(1, len(text))


def raising_reward(args, sample, **kwargs):
    raise RuntimeError("the grader fell over")


def hanging_reward(args, sample, **kwargs):
    time.sleep(3600)
