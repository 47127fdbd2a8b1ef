#!/usr/bin/env bash
# Worker job of the hpcgpu cluster demo: one `dask cuda worker` on each node, one Dask worker on each GPU.
#HPCGPU --job-name=demo
#HPCGPU --output=/home/me/.hpcgpu/clusters/demo/logs/%x-%j.log
#HPCGPU --gpus=2
#HPCGPU --time=3600


set -u
umask 077

directory=/home/me/.hpcgpu/clusters/demo
python=/opt/python/bin/python

# Waits for the scheduler's $directory/contact.json, checks what this job was given, then becomes the command after `--`, with the
# worker's name, protocol and interface added. Its workers retire before the walltime ends.
#
# The workers are forks of it. So it starts with what Dask sets before a worker starts, where nothing else is set. It starts once more
# if your Dask configuration has other values (distributed.nanny.pre-spawn-environ).
export HPCGPU_PRESET=
for value in PYTHONHASHSEED=6640 MALLOC_TRIM_THRESHOLD_=65536 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1; do
    name=${value%%=*}
    [ -n "${!name+set}" ] || { export "${value?}" && HPCGPU_PRESET="$HPCGPU_PRESET $name"; }
done
exec "$python" -P -m hpcgpu.runtime.launch worker local "$directory" \
    --gpus 2 --nodes 1 --timeout 300 --walltime 3600 --walltime-margin 600 -- \
    "$python" -m dask cuda worker --nthreads 1 \
        --resources GPU=1 \
        --dashboard-address 127.0.0.1:0 \
        --death-timeout 300
