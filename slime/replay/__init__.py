"""``slime replay``: one recorded sample again, in one process where ``breakpoint()`` works.

``recorded_engine`` sends the recorded replies, ``run`` holds the command and its steps. Nothing imports this room.
"""
