# `make demo` shows flyspec at work, `make test` checks it; both set up what they need in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# $(call install,EXTRA): pip would compile on one core. Files that are no Python of this version stay as they are.
install = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[$(1)]" \
	&& { $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; }
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

.PHONY: help demo test test-full lint types checks imports protos manifests prometheus unit stubs models clean images-check \
	gpu-test gpu-bench bench-engine check-exact check-rules check-accuracy check-rules-table check-cancel bench performance fuzz chaos pin-images audit loadtest

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-18s %s\n", $$1, $$2}' Makefile

$(VENV)/bin/python:
	@echo "== creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "flyspec needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# Compiles the native step as well.
$(VENV)/.installed: pyproject.toml constraints.txt flyspec/engine/native/step.cpp flyspec/engine/native/team.h | $(VENV)/bin/python
	@echo "== installing flyspec and its models extra (torch on first use: some minutes)"
	@$(call install,models)
	@$(BIN)/python -m flyspec.engine.native.library
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the tools that check flyspec"
	@$(call install,dev)
	@touch $@

demo: $(VENV)/.installed ## start the stack on the bundled models; generate; compare plain, exact and fly
	@$(BIN)/python -m demo

# Two jobs: the tests, and at a lower priority the checks, which take what cores the tests leave idle.
test: $(VENV)/.installed-dev ## everything that CI runs
	@$(MAKE) --no-print-directory -j 2 checks unit

checks: $(VENV)/.installed-dev
	@nice -n 10 $(MAKE) --no-print-directory $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) \
		lint imports protos types manifests

lint: $(VENV)/.installed-dev
	@echo "== ruff: style and common mistakes"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	@echo "== mypy: types"
	@$(BIN)/mypy

imports: $(VENV)/.installed-dev
	@echo "== import-linter: imports point one way"
	@$(BIN)/lint-imports

protos: $(VENV)/.installed-dev
	@echo "== buf: protos"
	@sh protos/check.sh

manifests: $(VENV)/.installed-dev ## Kubernetes manifests and compose files: rendered, validated, scanned
	@echo "== kubectl, kubernetes-validate, checkov, docker-compose: what is deployed"
	@$(BIN)/python -m deploy.check_manifests

prometheus: ## Prometheus and promtool for the tests, from Debian's packages, if this is root
	@echo "== Prometheus"
	@sh k8s/monitoring/install.sh

unit: $(VENV)/.installed-dev prometheus
	@echo "== pytest"
	@$(BIN)/python -m pytest -m "not full and not gpu" -rfEsR -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

test-full: $(VENV)/.installed-dev prometheus ## every test in its long form, ten times as many examples of properties; hours
	@$(BIN)/python -m pytest -m "not gpu" --hypothesis-profile=full -rfEsR $(PYTEST_ARGS)

gpu-test: $(VENV)/.installed-dev ## the tests that need a CUDA device; skips them where there is none
	@echo "== pytest: what needs a CUDA device"
	@$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
		|| echo "torch sees no CUDA device: the tests are collected and skipped"
	@$(BIN)/python -m pytest -m gpu -rs $(PYTEST_ARGS)

stubs: $(VENV)/.installed-dev ## regenerate flyspec/v1 from protos/
	PATH="$(BIN):$$PATH" $(BIN)/python protos/generate.py

models: $(VENV)/.installed ## retrain the bundled models (about an hour on two cores)
	$(BIN)/python -m demo.train --what all

check-rules: $(VENV)/.installed-dev ## the long forms of the rules' tests
	@$(BIN)/python -m pytest --hypothesis-profile=full tests/rules tests/test_validation.py $(PYTEST_ARGS)

DATA ?= ../shared/data
check-exact: $(VENV)/.installed ## exact equals transformers' greedy generate, and plain decoding bit for bit, over DATA and fresh problems
	@$(BIN)/python -m bench.exactness --data $(DATA) $(ARGS)
	@$(BIN)/python -m bench.exactness --data $(DATA) --dtype bfloat16 --reference plain $(ARGS)
	@$(BIN)/python -m bench.exactness --data $(DATA) --dtype float32 --reference plain --limit 20 $(ARGS)

check-accuracy: $(VENV)/.installed ## accuracy of each rule on 500 fresh word problems
	@$(BIN)/flyspec eval --problems 500 $(ARGS)

check-rules-table: $(VENV)/.installed ## what every rule wins and loses, on 500 fresh word problems and DATA's HumanEval
	@mkdir -p build
	@$(BIN)/flyspec eval --rules all --problems 500 --output build/rules-problems.json $(ARGS)
	@$(BIN)/flyspec eval --rules all --prompt-file $(DATA)/HumanEval.jsonl.gz \
		--output build/rules-humaneval.json $(ARGS)

check-cancel: $(VENV)/.installed-dev ## cancelled requests leave nothing behind
	@$(BIN)/python -m pytest tests/e2e/test_cancellation.py $(PYTEST_ARGS)

pin-images: ## append current digests to the third-party images in .env
	@sh deploy/pin_images.sh

chaos: $(VENV)/.installed ## five minutes of killed, held and cut services under 32 streams
	@$(BIN)/python -m loadtest.chaos --seconds 300 $(ARGS)

images-check: $(VENV)/.installed-dev ## build the images, run cpu-demo with podman, test it (root, Debian, half an hour)
	@$(BIN)/python -m deploy.images_check $(ARGS)

# Each piece is a file that is made once: what was interrupted goes on, `make build/performance/NAME.json` is one piece.
PERFORMANCE := build/performance
REPEATS ?= 5
PLAIN_REPEATS ?= 21
PROMPTS ?= 12
PEERS ?= all
# Such as AGAINST="--against llama=http://127.0.0.1:8080".
AGAINST ?=
BATCHES ?= 2,4,8,16,32
KS ?= auto,0,2,4,8,15,25
SPEED = $(BIN)/flyspec bench --repeats $(REPEATS) --limit $(PROMPTS) --max-tokens 128 $(ARGS)
BESIDE = $(if $(PEERS),--peers $(PEERS)) $(AGAINST)
WRITE = --output $@.part && mv $@.part $@
mgsm := $(foreach language,de fr th,--prompt-file $(DATA)/mgsm_$(language).tsv)
files = $(foreach file,gsm8k_test.jsonl spec_bench_question.jsonl HumanEval.jsonl.gz acp_prog_gen_dev.json,--prompt-file $(DATA)/$(file))
# Whether speculation is ever slower: so often, with plain decoding twice, that chance averages out.
twice = --rules plain,exact,fly --repeats $(PLAIN_REPEATS)
bench-plain = $(files) $(mgsm) --random-prompts $(PROMPTS) --ignore-eos $(twice)
bench-plain-problems = --problems $(PROMPTS) $(twice)
# Word problems end; other texts of the bundled models may end at once, or never.
bench-problems = --problems $(PROMPTS) --num-speculative-tokens auto,15 $(BESIDE)
bench-gsm8k = --prompt-file $(DATA)/gsm8k_test.jsonl --ignore-eos $(BESIDE)
bench-spec-bench = --prompt-file $(DATA)/spec_bench_question.jsonl --ignore-eos $(BESIDE)
bench-humaneval = --prompt-file $(DATA)/HumanEval.jsonl.gz --ignore-eos $(BESIDE)
bench-mgsm = $(mgsm) --ignore-eos $(BESIDE)
bench-acpbench = --prompt-file $(DATA)/acp_prog_gen_dev.json --ignore-eos $(BESIDE)
bench-random = --random-prompts $(PROMPTS) --ignore-eos --rules plain,exact,fly $(BESIDE)
bench-batches = --problems $(PROMPTS) --prompt-file $(DATA)/gsm8k_test.jsonl --ignore-eos --batch $(BATCHES) --repeats 25 --rules plain,exact,fly $(AGAINST)
bench-hindsight = --problems $(PROMPTS) --prompt-file $(DATA)/gsm8k_test.jsonl --prompt-file $(DATA)/mgsm_fr.tsv \
	--ignore-eos --num-speculative-tokens $(KS) --repeats 3
bench-drafters = --problems $(PROMPTS) --prompt-file $(DATA)/gsm8k_test.jsonl --prompt-file $(DATA)/spec_bench_question.jsonl \
	--prompt-file $(DATA)/HumanEval.jsonl.gz --random-prompts $(PROMPTS) --ignore-eos --drafter model,multi_level --repeats 3
bench-dtypes = --problems $(PROMPTS) --rules plain --compare-dtypes
# One thread for each model: they work at the same time.
comma := ,
padded = --pad-target-layers 100$(1) --threads 1 --draft-threads 1 --rules exact,fly
real := --shape llama-1b --replay-drafter 0.1 --repeats 1
pair-real = $(real) --problems 2 --max-tokens 48
# Lossy texts depend on K: behind tokens that it does not know the replaying drafter would have to ask.
pair-real-auto = $(real) --problems 3 --max-tokens 96 --rules exact --num-speculative-tokens auto
pair-slow-auto = $(padded) --problems 8 --max-tokens 96 --num-speculative-tokens auto
pair-3.6 = $(call padded,$(comma)auto:3.6) --num-speculative-tokens 2
pair-11.7 = $(call padded,$(comma)auto:11.7) --num-speculative-tokens 6
# The same with steps four times as long, beside which what is between the models counts less.
longer = --pad-target-layers 400,auto:$(1) --threads 1 --draft-threads 1 --rules exact,fly --max-tokens 48 --repeats 2
pair-long-3.6 = $(call longer,3.6) --num-speculative-tokens 2
pair-long-11.7 = $(call longer,11.7) --num-speculative-tokens 3
PIECES ?= plain plain-problems problems gsm8k spec-bench humaneval mgsm acpbench random batches dtypes hindsight drafters round \
	pair-3.6 pair-11.7 pair-long-3.6 pair-long-11.7 pair-real pair-real-auto pair-slow-auto
bench: $(PIECES:%=$(PERFORMANCE)/%.json) performance ## docs/performance.md: measured in pieces, goes on where it stopped; about two hours

$(PERFORMANCE)/%.json: | $(VENV)/.installed
	@mkdir -p $(PERFORMANCE)
	@echo "== flyspec bench: $*"
	@$(SPEED) $(bench-$(firstword $(subst @, ,$*))) $(WRITE)

$(PERFORMANCE)/round.json: | $(VENV)/.installed
	@mkdir -p $(PERFORMANCE)
	@echo "== flyspec bench round"
	@$(BIN)/flyspec bench round $(WRITE)

$(PERFORMANCE)/pair-%.json: | $(VENV)/.installed
	@mkdir -p $(PERFORMANCE)
	@echo "== flyspec bench pair: $*"
	@$(BIN)/flyspec bench pair $(pair-$*) $(WRITE)

performance: $(VENV)/.installed-dev ## write docs/performance.md's tables and plots from build/performance
	@$(BIN)/python -m bench.performance $(PERFORMANCE)

# Needs no network and no docs; one device for both models, half of the prompts.
gpu-bench: ## the same tables on a CUDA device, in ten minutes: build/performance-gpu
	@$(MAKE) --no-print-directory PERFORMANCE=build/performance-gpu PROMPTS=6 REPEATS=3 PEERS=greedy,assisted \
		BATCHES=8,32 KS=auto,0,4,15 ARGS="--device cuda $(ARGS)" \
		$(foreach piece,problems gsm8k humaneval random batches,build/performance-gpu/$(piece).json)

TP ?= 1,2,4
bench-engine: $(VENV)/.installed-dev ## steps, prefill and ranks; many requests at once; a long prompt among them
	@mkdir -p build docs/images
	@$(BIN)/flyspec bench engine --tensor-parallel-size $(TP) \
		--output build/engine.json --plot docs/images/engine-steps.svg $(ARGS)
	@$(BIN)/flyspec bench throughput \
		--output build/throughput.json --plot docs/images/engine-throughput.svg
	@$(BIN)/flyspec bench prefill-stall \
		--output build/prefill-stall.json --plot docs/images/engine-prefill-stall.svg

SCENARIO ?= ramp
RAMP := --steps 1,2,4,8,16 --rule fly --num-speculative-tokens 15 --against 0
LOAD ?= $(if $(filter ramp,$(SCENARIO)),$(RAMP))
loadtest: $(VENV)/.installed-dev ## two minutes of load on the bundled pair: SCENARIO=ramp, soak, burst, ...
	@mkdir -p build
	@$(BIN)/python -m loadtest.bundled $(SCENARIO) --seconds 100 $(LOAD) \
		--html build/load-$(SCENARIO).html --json build/load-$(SCENARIO).json $(ARGS)

MESSAGES ?= 200000
fuzz: $(VENV)/.installed-dev ## hostile messages to every server: MESSAGES each; 40 minutes on two cores
	@$(BIN)/python -m loadtest.fuzz --num-messages $(MESSAGES) $(ARGS)

audit: $(VENV)/.installed-dev ## known vulnerabilities of the versions in constraints.txt; needs a registry's advisories
	@$(call install,audit)
	@$(BIN)/pip-audit -r constraints.txt --no-deps --disable-pip --strict $(ARGS)

clean: ## remove what make made
	rm -rf $(VENV) .venv-manifests node_modules build *.egg-info
