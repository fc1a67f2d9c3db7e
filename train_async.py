"""The asynchronous loop: the next rollouts are generated while the trainer works on this one.

python train_async.py --hf-checkpoint MODEL --prompt-data FILE --rollout-num-gpus 2 --actor-num-gpus-per-node 2 ...
"""

import sys

from slime.utils.arguments import parse_args


def train(args):
    from slime.ray.run.loop import is_due, start_run

    with start_run(args) as run:
        run.sync_weights(num_trained=run.start_rollout_id)
        prefetched = run.prefetch_rollouts()
        for rollout_id in run.rollout_ids:
            rollout = prefetched.take(rollout_id)
            report = run.train(rollout_id, rollout)

            last = run.num_rollout - 1
            if run.saves_after(rollout_id):
                run.save(rollout_id)
            if is_due(rollout_id, args.update_weights_interval, last):
                # A rollout is made by one set of weights: the one in flight ends first.
                with prefetched.engines_idle():
                    run.sync_weights(num_trained=rollout_id + 1)
            run.report(rollout_id, rollout, report)
            if is_due(rollout_id, args.eval_interval):
                run.evaluate(rollout_id, num_trained=rollout_id + 1)


def main():
    if "--plan" in sys.argv[1:]:
        from slime.cli import main as slime

        return slime(["plan", "train_async.py", *sys.argv[1:]])
    args = parse_args(is_async=True)
    from slime.observability.logging_utils import configure_logger
    from slime.ray.run.cluster import running_cluster
    from slime.ray.run.main import exit_status, run_to_the_end

    configure_logger()
    with exit_status(), running_cluster(args):
        run_to_the_end(train, args)


if __name__ == "__main__":
    sys.exit(main())
