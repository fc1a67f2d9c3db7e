"""A user's functions that take their time, and show in a file of the run's folder that they are at work."""

import asyncio
import time
from pathlib import Path

from tests.e2e.plugin_functions import share_of_sevens


async def lingering_reward(args, sample, **kwargs):
    """``share_of_sevens``, a little later."""
    _show(args, "reward", sample.group_index // args.rollout_batch_size)
    await asyncio.sleep(0.2)
    return await share_of_sevens(args, sample)


def lingering_post_process(args, samples, **kwargs):
    """Unchanged rewards. Called while the batch is made."""
    _show(args, "convert", samples[0].group_index // args.rollout_batch_size)
    time.sleep(0.2)
    rewards = [sample.get_reward_value(args) for sample in samples]
    return rewards, rewards


def _show(args, phase, rollout_id):
    path = Path(args.output_dir) / args.experiment_name / f"in_{phase}"
    if not path.exists() or path.read_text() != str(rollout_id):
        path.with_suffix(".new").write_text(str(rollout_id))
        path.with_suffix(".new").replace(path)
