# make demo: makes the environment and runs a cluster on real data.
# make notebook: adds JupyterLab to the environment and opens a notebook that does the same.
# make test: makes the environment, installs what the tests need (Slurm, a browser, Charliecloud, Podman and OpenSSH from Debian's packages,
#   if it may), runs all checks.
# make test-site: as root, starts a Slurm site in containers (ci/slurm-docker), runs its tests and removes it.
# make test-plugins: tests of the batch systems in plugins/, on their real daemons (Debian's packages, unpacked into /var/tmp).

PYTHON := .venv/bin/python

.PHONY: demo notebook test test-site plugin-daemons test-plugins clean

demo:
	@ci/environment.sh examples
	@$(PYTHON) -m hpcgpu demo
	@echo "The same in JupyterLab, examples/flights.ipynb: make notebook"

notebook:
	@ci/environment.sh notebook
	@.venv/bin/jupyter lab examples/flights.ipynb

test:
	@ci/environment.sh test
	@$(PYTHON) tests/slurm/bed.py install || echo "the tests that need a real Slurm will be skipped"
	@$(PYTHON) tests/browser/browser.py install || echo "the tests that need a browser will be skipped"
	@$(PYTHON) tests/local/container_tools.py install || echo "the tests that need Charliecloud and Podman will be skipped"
	@$(PYTHON) tests/ssh/sshd_bed.py install || echo "the tests that need OpenSSH will be skipped"
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@ci/tests.sh

test-site:
	@ci/environment.sh test
	@ci/test-site.sh

plugin-daemons:
	@ci/environment.sh test
	@$(PYTHON) plugins/gridengine/tests/gridengine_bed.py install || echo "the tests that need a Grid Engine will be skipped"
	@$(PYTHON) plugins/htcondor/tests/htcondor_bed.py install || echo "the tests that need an HTCondor will be skipped"

test-plugins: plugin-daemons
	@$(PYTHON) -m pytest plugins

clean:
	rm -rf .venv .venv-lowest dist
