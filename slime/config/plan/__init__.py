"""What a train command will do, worked out from its arguments alone: ``slime plan`` and ``train.py --plan``.

Pure arithmetic over the resolved namespace: nothing is started, no torch, no Ray. ``build`` assembles the sections,
``render`` prints them. Every formula stands in docs/plan.md with its source.
"""
