#!/usr/bin/env bash
# Scheduler job of the hpcgpu cluster demo: it runs the Dask scheduler on one GPU.
#HPCGPU --job-name=demo-scheduler
#HPCGPU --output=/home/me/.hpcgpu/clusters/demo/logs/%x-%j.log
#HPCGPU --gpus=1



set -u
umask 077

directory=/home/me/.hpcgpu/clusters/demo
python=/opt/python/bin/python

# Checks what this job was given, chooses protocol and interfaces, then becomes the command after `--`. The scheduler publishes its
# addresses in $directory/contact.json, where workers and clients look for them.
exec "$python" -P -m hpcgpu.runtime.launch scheduler local "$directory" \
    --gpus 1 --protocol auto --lease 600 -- \
    "$python" -m distributed.cli.dask_scheduler --port 0,0 --no-dashboard \
        --idle-timeout 3600 \
        --preload hpcgpu.dask_scheduler.scheduler_preload
