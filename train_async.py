"""The asynchronous loop: the next rollouts are generated while the trainer works on this one.

python train_async.py --hf-checkpoint MODEL --prompt-data FILE --rollout-num-gpus 2 --actor-num-gpus-per-node 2 ...
"""

import sys

from slime.ray.run.main import run_command


def train(args):
    from slime.ray.run.loop import is_due
    from slime.ray.run.start import start_run

    with start_run(args) as run:
        run.sync_weights(num_trained=run.start_rollout_id)
        prefetched = run.prefetch_rollouts()
        for rollout_id in run.rollout_ids:
            rollout = prefetched.take(rollout_id)
            report = run.train(rollout_id, rollout)

            if run.saves_after(rollout_id):
                run.save(rollout_id)
            if is_due(rollout_id, args.update_weights_interval, run.num_rollout - 1):
                # One set of weights generates a rollout: the one in flight ends first.
                with prefetched.engines_idle():
                    run.sync_weights(num_trained=rollout_id + 1)
            run.report(rollout_id, rollout, report)
            if is_due(rollout_id, args.eval_interval, run.num_rollout - 1):
                run.evaluate(rollout_id, num_trained=rollout_id + 1)


def main():
    return run_command(train, "train_async.py", is_async=True)


if __name__ == "__main__":
    sys.exit(main())
