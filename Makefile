# Stanchion: what to build and run. `make help` lists the targets.
#
#   MPI=openmpi|mpich|system   which MPI the examples are built with and run under;
#                              the first two are installed below .mpi, without root

MPI ?= openmpi
ifeq ($(filter openmpi mpich system,$(MPI)),)
$(error MPI must be openmpi, mpich or system, not '$(MPI)')
endif

CARGO ?= cargo
# Where libscr.so and the executables are.
LIBDIR ?= target/release
OUT := target/examples/$(MPI)
MPI_ENV := scripts/mpi-env $(MPI)
SCR_TESTS := test_api test_config test_output test_restart_reject test_current test_halt
PROGRAMS := $(addprefix $(OUT)/,heat2d heat2d-plain heat2d_regions $(SCR_TESTS) serial test_cpp)
HEAT_CORE := examples/heat2d_core.c examples/heat2d_core.h

WARN := -Wall -Wextra -Wconversion
CFLAGS ?= -O2 -g
CXXFLAGS ?= -O2 -g
C_ALL := -std=c11 $(WARN) -Iinclude
CXX_ALL := -std=c++17 $(WARN) -Iinclude
# The programs find the libraries beside themselves in target/, wherever that lies.
LINK_DIR := -L$(LIBDIR) -Wl,-rpath,'$$ORIGIN/../../release'
LINK := $(LINK_DIR) -lscr
LINK_NATIVE := $(LINK_DIR) -lstanchion

.DELETE_ON_ERROR:
.PHONY: help build mpi examples demo test soak bench clean

help:
	@echo 'make build      the agent, the libraries and the stanchion command'
	@echo 'make mpi        an MPI below .mpi (MPI=openmpi or mpich; now: $(MPI))'
	@echo 'make examples   example programs in $(OUT)'
	@echo 'make demo       a job that loses a node and goes on'
	@echo 'make test       all tests'
	@echo 'make soak       random failures for a long time'
	@echo 'make bench      the benchmarks, with their goals'
	@echo 'make clean      removes target/, keeps .mpi/'

build:
	$(CARGO) build --release

mpi:
ifneq ($(MPI),system)
	@scripts/mpi-setup $(MPI)
endif

# cargo decides what there is to do; only what it rebuilt is linked again.
ifeq ($(LIBDIR),target/release)
$(LIBDIR)/libscr.so $(LIBDIR)/libstanchion.so: build ;
endif

examples: $(PROGRAMS)

$(OUT):
	@mkdir -p $@

$(OUT)/heat2d: examples/heat2d.c $(HEAT_CORE) include/scr.h $(LIBDIR)/libscr.so | $(OUT) mpi
	$(MPI_ENV) mpicc $(C_ALL) $(CFLAGS) -o $@ $< examples/heat2d_core.c $(LINK)

$(OUT)/heat2d-plain: examples/heat2d.c $(HEAT_CORE) | $(OUT) mpi
	$(MPI_ENV) mpicc $(C_ALL) $(CFLAGS) -DHEAT2D_NO_SCR -o $@ $< examples/heat2d_core.c

$(OUT)/heat2d_regions: examples/heat2d_regions.c $(HEAT_CORE) include/stanchion.h \
		$(LIBDIR)/libstanchion.so | $(OUT) mpi
	$(MPI_ENV) mpicc $(C_ALL) $(CFLAGS) -o $@ $< examples/heat2d_core.c $(LINK_NATIVE)

$(addprefix $(OUT)/,$(SCR_TESTS)): $(OUT)/%: examples/scr/%.c examples/scr/common.c \
		examples/scr/common.h include/scr.h $(LIBDIR)/libscr.so | $(OUT) mpi
	$(MPI_ENV) mpicc $(C_ALL) $(CFLAGS) -o $@ $< examples/scr/common.c $(LINK)

$(OUT)/serial: examples/scr/serial.c examples/scr/common.c examples/scr/common.h include/scr.h \
		$(LIBDIR)/libscr.so | $(OUT)
	$(CC) $(C_ALL) $(CFLAGS) -o $@ $< examples/scr/common.c $(LINK)

$(OUT)/test_cpp: examples/scr/test_cpp.cpp include/scr.h $(LIBDIR)/libscr.so | $(OUT) mpi
	$(MPI_ENV) mpicxx $(CXX_ALL) $(CXXFLAGS) -o $@ $< $(LINK)

demo: build examples
	MPI=$(MPI) scripts/demo

test: build examples
	MPI=$(MPI) scripts/test

soak: build examples
	MPI=$(MPI) scripts/soak

# BENCH=NAME runs one of them.
bench: build examples
	MPI=$(MPI) $(LIBDIR)/stanchion bench $(BENCH)

clean:
	rm -rf target
