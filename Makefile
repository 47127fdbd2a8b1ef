# make demo: makes the environment and runs a cluster on real data.
# make notebook: adds JupyterLab to the environment and opens a notebook that does the same.
# make test: makes the environment, installs what the tests need (Slurm, a browser, Charliecloud and Podman from Debian's packages, if it
#   may), runs all checks.
# make test-site: as root, starts a Slurm site in containers (ci/slurm-docker), runs its tests and removes it.

PYTHON := .venv/bin/python

.PHONY: demo notebook test test-site clean

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
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@ci/tests.sh

test-site:
	@ci/environment.sh test
	@ci/test-site.sh

clean:
	rm -rf .venv .venv-lowest dist
