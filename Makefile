# Needs Python 3.11, make and git; everything else lands in .venv.
#
#   make test                     lint, types, tests
#   make train                    the example on 4 ranks; STEPS= DATA= SIZE= RANKS= CONFIG= OUT= change it
#   make text-to-image            text to image on 4 ranks, STEPS= DATA= RANKS= OUT= change it; FLAGS= are train.py's
#   make cascade                  a base and a super-resolution model in one pipeline, on 4 ranks; STEPS= DATA= RANKS= OUT=
#   make docs                     the documentation as a site, in out/site/
#   make soak bench pictures      slow proofs, benchmarks, the pictures of docs/
#   make test-diffusers-old       tests of the models with the oldest diffusers supported, in .venv-old
#   make test-deepspeed-old       tests of the engine with the last DeepSpeed 0.18, in .venv-deepspeed-old
#   make test-torch-old           tests of traced models with torch 2.12, in .venv-torch-old
#   make test-packages            traced U-Nets of other packages, which lie in .venv/packages without what they need

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
OLD := .venv-old/bin
RANKS ?= 4
CONFIG ?= examples/unet/ds_config.json
TRAIN_FLAGS = --deepspeed_config $(CONFIG) $(if $(STEPS),--steps $(STEPS)) $(if $(DATA),--data $(DATA)) $(if $(SIZE),--size $(SIZE)) $(if $(OUT),--out $(OUT))

TEXT_TO_IMAGE_FLAGS = --center_crop --cache_latents --proportion_empty_prompts 0.1 \
    --max_train_steps $(or $(STEPS),400) --learning_rate 1e-3 --lr_scheduler cosine --lr_warmup_steps 20 \
    --checkpointing_steps 100 --resume_from_checkpoint latest --validation_steps 50 --guidance_scale 3 \
    --validation_prompts "the face of a ginger tabby cat" "a cup of coffee on a red saucer" "craters on the moon" \
    "a rocket under a blue evening sky" "a red motorcycle in a garage" "the retina of a human eye" \
    $(if $(DATA),--train_data_dir $(DATA)) $(if $(OUT),--output_dir $(OUT)) $(FLAGS)

# A rank is one process with one thread, and tests never depend on the accelerator at hand.
TEST_ENV = OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu LOCAL_SIZE=1

.PHONY: all .venv .venv-old .venv-deepspeed-old test test-diffusers-old test-deepspeed-old test-torch-old test-packages lint types train text-to-image cascade docs soak bench pictures clean
all: test

.venv: .venv/.stamp
.venv-old: .venv-old/.stamp
.venv-deepspeed-old: .venv-deepspeed-old/.stamp

# DeepSpeed is built from source: its setup imports torch, so torch goes first and the build is not
# isolated. DS_BUILD_OPS=0 keeps it from compiling kernels; none is needed here.
.venv/.stamp: CONSTRAINTS := constraints.txt
.venv/.stamp: constraints.txt
.venv-old/.stamp: CONSTRAINTS := constraints-diffusers-old.txt
.venv-old/.stamp: constraints-diffusers-old.txt
.venv-deepspeed-old/.stamp: CONSTRAINTS := constraints-deepspeed-old.txt
.venv-deepspeed-old/.stamp: constraints-deepspeed-old.txt
.venv/.stamp .venv-old/.stamp .venv-deepspeed-old/.stamp: %/.stamp: setup.py
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet -c $(CONSTRAINTS) setuptools wheel ninja torch
	DS_BUILD_OPS=0 $*/bin/python -m pip install --quiet --no-build-isolation -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

# Tracing uses private names of torch, so it is tested with one older minor, too. The rest is taken from .venv.
.venv-torch-old/.stamp: .venv/.stamp
	test -x .venv-torch-old/bin/python || $(PYTHON) -m venv .venv-torch-old
	.venv-torch-old/bin/python -m pip install --quiet torch==2.12.1
	echo $(CURDIR)/$$(echo .venv/lib/python3*/site-packages) > $$(echo .venv-torch-old/lib/python3*/site-packages)/rest.pth
	touch $@

test-torch-old: .venv-torch-old/.stamp
	PYTHONPATH=$(CURDIR):tests $(TEST_ENV) .venv-torch-old/bin/python -m pytest $(or $(TESTS),tests/models/traced)

.venv/packages/.stamp: tests/support/packages.txt .venv/.stamp
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/packages -r tests/support/packages.txt
	touch $@

test-packages: .venv/packages/.stamp
	PYTHONPATH=.venv/packages:tests $(TEST_ENV) $(BIN)/python -m pytest -m soak tests/models/traced/test_packages.py

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv
	$(BIN)/mypy

# Three files at a time: ranks wait for each other, so two leave two cores idle. Files go out by name, not those with many
# tests first: those with few launch ranks and take longest. What fails runs once more, alone; what passes then is "unsteady".
# Types are checked meanwhile, which takes a minute in a fresh checkout, and told at the end.
test: lint
	@told=$$(mktemp); $(BIN)/mypy > $$told 2>&1 & mypy=$$!; \
	PYTHONPATH=tests:$$PYTHONPATH $(TEST_ENV) $(BIN)/python -m pytest -p support.unsteady -n 3 --dist loadfile --no-loadscope-reorder $(TESTS); tests=$$?; \
	wait $$mypy; types=$$?; echo "$(BIN)/mypy"; cat $$told; rm $$told; exit $$((tests | types))

test-diffusers-old: .venv-old
	$(TEST_ENV) $(OLD)/python -m pytest -n 2 --dist loadfile $(or $(TESTS),tests/models)

# DeepSpeed 0.18 compiles a function when it is imported, and torch warns of one of its own on the way.
test-deepspeed-old: .venv-deepspeed-old
	$(TEST_ENV) .venv-deepspeed-old/bin/python -m pytest -W 'ignore:`torch.jit:DeprecationWarning' -n 2 --dist loadfile $(or $(TESTS),tests/engine)

# $(call ranks,SCRIPT FLAGS): with fewer accelerators than ranks, the ranks are processes on the CPU. A free port lets
# runs stand side by side.
define ranks
@count=$$($(BIN)/python -c 'import torch; print(torch.accelerator.device_count())'); \
where="of this machine's accelerators"; \
if [ "$$count" -lt $(RANKS) ]; then \
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; where="processes of this machine"; fi; \
port=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'); \
echo "Training on $(RANKS) ranks, $$where. The first line comes in about half a minute."; \
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --quiet --num_accelerators $(RANKS) --master_port $$port $(1)
endef

train: .venv
	$(call ranks,examples/unet/train.py $(TRAIN_FLAGS))

text-to-image: .venv
	$(call ranks,examples/text_to_image/train.py $(TEXT_TO_IMAGE_FLAGS))

cascade: .venv
	$(call ranks,examples/cascade/train.py $(if $(STEPS),--steps $(STEPS)) $(if $(DATA),--data $(DATA)) $(if $(OUT),--out $(OUT)) $(FLAGS))

# Warnings are errors. The site is read without a network: open out/site/index.html.
docs: .venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# What draws mutants, for the slow proofs alone.
.venv/.mutants: .venv/.stamp
	$(BIN)/python -m pip install --quiet -c constraints.txt cosmic-ray coverage
	touch $@

# Slow proofs: full products, and mutants that the tests must notice. TESTS= narrows them.
soak: .venv/.mutants
	$(TEST_ENV) $(BIN)/python -m pytest -m soak -n 2 --dist worksteal $(TESTS)

# All benchmarks; some need root and an idle machine. What missed a promise, or has more to do (slow_network), is named.
bench: .venv
	@for script in benchmarks/*/run.py; do \
	    echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python "$$script" || failed="$$failed $$script"; done; \
	test -z "$$failed" || { echo "not whole:$$failed"; exit 1; }

pictures: .venv
	$(BIN)/python docs/draw_wave.py
	mkdir -p out/pictures
	$(BIN)/ds_pulse profile sd15 --estimate --out out/pictures/profile.json
	$(BIN)/ds_pulse plan out/pictures/profile.json --cluster a100:1x4 --pipeline-ranks 4 --microbatches 8 \
	    --placement wave --solver-seconds 0 --out out/pictures/plan.json
	$(BIN)/ds_pulse show out/pictures/profile.json --plan out/pictures/plan.json --out docs/pictures/model.png
	$(BIN)/ds_pulse show out/pictures/plan.json --profile out/pictures/profile.json --cluster a100:1x4 --out docs/pictures/timeline.png

clean:
	rm -rf .venv .venv-old .venv-deepspeed-old .venv-torch-old build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
