"""The plan of a train command, computed from its arguments alone: ``slime plan`` and ``train.py --plan``.

Pure arithmetic over the resolved namespace: nothing is started, no torch, no Ray. ``build`` assembles the sections,
``render`` prints them. docs/plan.md has every formula with its source.
"""
