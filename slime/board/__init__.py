"""``slime board``: a web page over the files of a run, live while it trains.

``run_data`` reads the files, ``server`` answers the page's questions, ``static`` is the page. Knows files only: nothing
here imports torch, Ray, Megatron or SGLang, and nothing else imports this room.
"""
