"""``slime doctor``: can this machine run that command? One line per check, with the fix where one fails.

Each check is a small function in ``checks``; ``run`` calls them all and prints. Nothing else imports this room.
"""
