# make demo    install, make a small model, measure this machine, serve three policies under pressure, compare;
#              README=1 also puts the result into README.md and experiments/records/demo, TRACE=FILE replays a trace
# make test    install and run all tests; what they draw is the same each time
# make fuzz    the property tests alone, drawing anew, for ROUNDS=20; a failure prints the SEED=... that repeats it
# make test-network    what asks a package index: that '.[gpu]' resolves, vLLM's own scheduler tests, AgentX (10 minutes)
# make dist    the wheel and sdist in dist/: built, checked, installed into an empty environment, served (ten minutes)
# make site    the pages as a site in .work/site; a dead link fails
# make check   style and types only
# make soak-machine    the scheduler's state machine for 1,000,000 steps (ten minutes of a core); SEED=... repeats one
# make soak-oracle     whose KV requests attend to, for as many steps of each mix (an hour of a core); SEED=... repeats one

unexport PYTHONDONTWRITEBYTECODE  # where it is set each server compiles all of torch and vLLM again: 20 s

VENV := .venv
PYTHON := $(VENV)/bin/python
TOOLS := .work/tools
ANY_SEED = $(shell od -An -N4 -tu4 /dev/urandom)

.PHONY: demo test test-network fuzz check install dist site soak-machine soak-oracle
install: $(VENV)/installed
	@cat $(VENV)/installed

$(VENV)/installed: requirements/cpu.lock requirements/install-cpu pyproject.toml
	requirements/install-cpu $(VENV)

demo: install
	$(PYTHON) -m experiments.demo $(if $(TRACE),--trace "$(TRACE)") $(if $(README),--readme)

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

dist:
	rm -rf dist build *.egg-info $(TOOLS) .work/served
	python3 -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --quiet --disable-pip-version-check install -r requirements/dist.lock
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/python -m twine check --strict dist/*
	requirements/try-wheel .work/served dist/*.whl

site: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

soak-machine: install
	MACHINE_STEPS=1000000 $(PYTHON) -m pytest -s tests/test_scheduler_machine.py --hypothesis-seed $(or $(SEED),$(ANY_SEED))

soak-oracle: install
	ORACLE_STEPS=1000000 ORACLE_SEED=$(SEED) $(PYTHON) -m pytest -s tests/test_kv_oracle_machine.py -k no_order

test: check
	$(PYTHON) -m pytest -n 2 --dist loadfile --maxfail 20

fuzz: install
	for seed in $(or $(SEED),$(shell od -An -N$$((4 * $(or $(ROUNDS),20))) -w4 -tu4 /dev/urandom)); do \
	  $(PYTHON) -m pytest -n 2 --dist loadfile -m hypothesis --hypothesis-profile fuzz --hypothesis-seed $$seed \
	  || { echo "to repeat: make fuzz SEED=$$seed"; exit 1; }; done

test-network: install
	$(PYTHON) -m pytest -m network
