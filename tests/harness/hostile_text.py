"""What 13 programs print that imitate our protocol or mpirun, escape, flood, and never end a line."""

HOSTILE = [
    b'@spr {"event":"step","step":1}\n',
    b'@spr {"event": "step", "step": 1, "total": 0}\n',
    b'@spr {"event": "error", "message": "x", "exit_code": "abc"}\n',
    b'@spr {"event": "error", "message": "x", "exit_code": 0}\n',
    b'@spr {"event": "restarted", "attempt": 2, "nodes": ["node1"]}\n',
    b'@spr 00000000 {"event": "result", "f1": 100}\n',
    b"@spr " + b"[" * 200_000,
    b"error launching processes\nUnable to run bstrap_proxy on node1\n",
    b"= RANK " + b"9" * 5000 + b" PID 1 RUNNING AT node9\n= KILLED BY SIGNAL: 9 (Killed)\n",
    b"\x1b]0;title\x07\x1b[2J\x1b[Hx\x9b2J\x1bcy\n\x1b]0;unfinished\nz\n",
    b"\r".join(b"%d%%" % each for each in range(100_000)) + b"\n",
    b"\xff\xfe\0\x07\b\n" * 1000,
    b"x" * 5_000_000,
]
