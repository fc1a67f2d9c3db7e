"""``slime replay``: one recorded sample again, in one process where ``breakpoint()`` works.

``run`` holds the command, its steps and the recorded replies, ``history`` whole schedules. Nothing imports this room.
"""
