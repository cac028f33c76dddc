#!/usr/bin/env python3
# A job over the REST API: submitted, watched until it has ended, why it waited or started, and what it used.
# SLUICE_URL has the address, ~/.config/sluice/token the token: sluice token create --scope read --scope write ...
#
# alice@login$ python3 rest_client.py
# ...job ... RUNNING l40s-...
# ...job ... COMPLETED l40s-...
# decision: ...
# COMPLETED after ... s, GPUs: 1
from sluice.client import Client

with Client() as sluice:
    script = "#!/bin/sh\nsleep 6\n"
    number = sluice.submit(script=script, gpus="1", memory="100M", time_limit="5", output="/dev/null").job_id
    for job in sluice.watch(number):
        print("job", job.id, job.state, job.nodes or job.reason)
    decision = sluice.job_explanation(number).decision
    print("decision:", decision.outcome if decision else "Slurm's own")
    report = sluice.job_report(number)
    print(report.job.state, "after", report.job.elapsed_s, "s, GPUs:", report.granted.tres["gres/gpu"])
