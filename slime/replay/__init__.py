"""``slime replay``: one recorded sample again, in one ordinary process where ``breakpoint()`` works.

``recorded_engine`` answers as the engines did, ``run`` generates, scores and trains with the run's own functions,
``command`` is the command line. Nothing else imports this room.
"""
