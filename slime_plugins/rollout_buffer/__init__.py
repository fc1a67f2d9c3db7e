"""A service that makes trajectories by itself and keeps them until a rollout takes them.

    buffer.py                   the service                       python -m slime_plugins.rollout_buffer.buffer
    generator/                  the generators, one module per task type, found by TASK_TYPE
    rollout_buffer_example.py   the rollout function that takes them: --rollout-function-path

A trajectory is a finished conversation with a reward. The service knows no tokens and no trainer.
"""
