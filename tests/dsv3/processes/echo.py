"""A linked child for `test_child`: echoes its input until its parent ends."""

import sys

from dsv3.processes.child import link_to_parent

if __name__ == "__main__":
    link = link_to_parent()
    while heard := link.recv(100):
        link.sendall(f"{sys.argv[1]} {heard.decode()}, and {sys.stdin.buffer.read()!r} on the standard input".encode())
