# make demo    install, make a small model, measure this machine, serve three policies under pressure, compare
# make test    install and run all tests
# make check   style and types only
# make soak-machine    the scheduler's state machine for 1,000,000 steps (ten minutes of a core)

VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: demo test check install soak-machine
install: $(VENV)/installed

$(VENV)/installed: requirements/cpu.lock requirements/install-cpu pyproject.toml
	requirements/install-cpu $(VENV)

demo: install
	$(PYTHON) -m experiments.demo $(if $(TRACE),--trace "$(TRACE)") $(if $(README),--readme)

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

soak-machine: install
	MACHINE_STEPS=1000000 $(PYTHON) -m pytest -s tests/test_scheduler_machine.py

test: check
	$(PYTHON) -m pytest -n 2 --dist loadfile
