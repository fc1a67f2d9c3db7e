# Every target does its own set-up: on a fresh machine it creates .venv and installs, afterwards that is instant.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Tests that start few processes. The others start several each: two of those at a time share two cores well, as a run
# waits much, and those that are marked "alone" come one after the other. Whole runs come first, so that no long file is
# left for one of two workers at the end. The tests of a file share their fixtures on one worker.
FAST_TESTS := tests/examples tests/architecture tests/unit tests/contracts
# Tests that compare numbers. They run twice on a CPU with AVX-512: with its best instructions, and with those of an
# older one. Other layouts and losses use the same operators.
WITHOUT_NUMBERS := %_rules.py %_shape.py $(addprefix %/test_,$(addsuffix .py,arguments conversion cpu_import \
	damaged_checkpoints deterministic_operators fp8_layers host_waits logprob_server offline offload optimizer_choice \
	optimizer_slices overlap patches prompt_path routing_replay scheduler skipped_steps tensor_layouts \
	trainer_checkpoint trainer_families user_spec))
NUMERIC_TESTS := tests/unit/algorithms \
	$(filter-out $(WITHOUT_NUMBERS),$(wildcard $(patsubst %,tests/unit/%_utils/test_*.py,fsdp megatron))) \
	$(patsubst %,tests/dist/test_%.py,context_parallel families_sharded fsdp mtp_layouts optimizer_layouts) \
	tests/dist/test_layouts_moe.py::test_a_model_with_experts_trains_like_on_one_rank \
	$(addprefix tests/dist/test_layouts.py::test_,one_kind_of_parallelism_trains_like_one_rank \
	in_bf16_the_first_step_differs_by_rounding_only)
OLDER_CPU := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
# One thread per process: several engines and trainers share the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test check bench gpu-check chaos docs format clean

setup:
	@$(PYTHON) tools/setup_env.py --venv $(VENV)

demo: setup  ## a tiny language model learns to add, by reinforcement learning, in a few minutes
	$(BIN)/python examples/demo/run_demo.py --output outputs/demo

test: setup  ## every test that needs no GPU, the real engines included
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(FAST_TESTS)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=15 -m "not alone" tests/e2e tests/dist
	$(BIN)/python -m pytest -q --durations=15 -m alone tests/e2e
	@if grep -qsw avx512f /proc/cpuinfo; then $(OLDER_CPU) $(BIN)/python -m pytest -q -n 2 --dist loadfile $(NUMERIC_TESTS); fi

check: setup  ## format, lint, types, architecture, unit tests: no network, no engine
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 tests/architecture tests/unit tests/contracts

bench: setup  ## tokens per second of one engine
	$(BIN)/python benchmarks/generation.py

gpu-check:  ## proves on a GPU that training works and how fast; ONLY=speed,save and SMALL=1 limit it
	@# without setup: it also runs with a python3 that has only torch and megatron-core
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m slime doctor --gpu --json \
		$(if $(ONLY),--only $(ONLY)) $(if $(SMALL),--small)

docs: setup  ## the pages of docs/ as a site in build/site; DOCS_REPO_URL=URL links the repository
	$(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

chaos: setup  ## kills every kind of process in every phase of a run; the tables of docs/reliability.md
	$(BIN)/python benchmarks/chaos.py --record outputs/chaos.jsonl --write
	$(BIN)/python benchmarks/elastic_engines.py --write
	$(BIN)/python benchmarks/chaos_pairs.py --write

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## what was built and cached, not .venv and not outputs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find slime tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
