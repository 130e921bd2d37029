"""One engine over several hosts: the leader schedules and sends its calls, the others execute them.

One process runs on each host. The first is the leader; the others are followers.
"""
