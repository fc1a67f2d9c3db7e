"""The synchronous loop: generate, train, send the new weights, again.

python train.py --hf-checkpoint MODEL --prompt-data FILE --rollout-num-gpus 2 --actor-num-gpus-per-node 2 ...
"""

import sys

from slime.ray.run.main import run_command


def train(args):
    from slime.ray.run.loop import is_due
    from slime.ray.run.start import start_run

    with start_run(args) as run:
        # The engines generate with the trainer's weights from the first token on.
        run.sync_weights(num_trained=run.start_rollout_id)
        if run.num_rollout == 0 and args.eval_interval is not None:
            run.evaluate(rollout_id=0, num_trained=0)

        for rollout_id in run.rollout_ids:
            if rollout_id == 0 and args.eval_interval is not None and not args.skip_eval_before_train:
                run.evaluate(rollout_id, num_trained=0)

            rollout = run.generate(rollout_id)
            report = run.train(rollout_id, rollout)

            if run.saves_after(rollout_id):
                run.save(rollout_id)
            if is_due(rollout_id, args.update_weights_interval, run.num_rollout - 1):
                run.sync_weights(num_trained=rollout_id + 1)
            run.report(rollout_id, rollout, report)
            if is_due(rollout_id, args.eval_interval, run.num_rollout - 1):
                run.evaluate(rollout_id, num_trained=rollout_id + 1)


def main():
    return run_command(train, "train.py")


if __name__ == "__main__":
    sys.exit(main())
