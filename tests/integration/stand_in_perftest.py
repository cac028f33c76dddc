#!/usr/bin/python3 -IS
"""ib_write_bw and ib_write_lat of machines without RDMA: two ends meet over TCP, and both print what their hosts can.

`speeds.json` next to it has the GB/s of slow hosts; to itself a host is fast, as only its cable is slow.
"""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

FAST = 48.0
parser = argparse.ArgumentParser()
for option in ("-d", "-p", "-D", "-n"):
    parser.add_argument(option)
for option in ("-F", "--report_gbits"):
    parser.add_argument(option, action="store_true")
parser.add_argument("peer", nargs="?")
given = parser.parse_args()
mine = float(json.loads(Path(sys.argv[0]).with_name("speeds.json").read_text()).get(os.uname().nodename, FAST))
if given.peer:
    end = socket.create_connection((given.peer, int(given.p)), 5)
else:
    end, _ = socket.create_server(("", int(given.p))).accept()
end.sendall(f"{os.uname().nodename} {mine}\n".encode())
name, speed = end.makefile().readline().split()
slower = FAST if name == os.uname().nodename else min(mine, float(speed))
time.sleep(0.1)
print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
print(f" 65536      50000            0.00               {8 * slower:.2f}               0.7")
if "lat" in sys.argv[0]:
    print(" #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]")
    print(" 2       1000          1.90           9.91         2.40             2.51")
