-- The site's filter of jobs. It refuses what asks for the nodes with P100 GPUs, in words of its own.
function slurm_job_submit(job, partitions, uid)
    if job.features and string.find(job.features, "p100") then
        slurm.log_user("The P100 nodes were switched off in March: ask for --constraint=a100 (see https://site.example/gpus)")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, old, partitions, uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
