# The habits of the project by name; CI calls the same scripts.
.PHONY: run test lint types format bench up down status

run:
	deploy/run.sh examples/guess_average/scenario.yaml

test:
	deploy/test.sh

lint:
	deploy/install.sh dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

types:
	deploy/install.sh dev
	.venv/bin/mypy

format:
	deploy/install.sh dev
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench:
	deploy/install.sh
	.venv/bin/python -m benchmarks.calls
	.venv/bin/python -m benchmarks.million

up down status:
	deploy/$@.sh
