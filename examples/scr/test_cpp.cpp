// SPDX-License-Identifier: Apache-2.0
//
// test_cpp: the interface from C++, with std::fstream.
//
//   --steps N (6), --size NUMBERS (10000), --expect-restart STEP,
//   --die-at STEP, --die-rank R (0): kills itself at this step, unless restarted
//
// One file for each rank, NUMBERS doubles that follow from rank and step.
#include <mpi.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "scr.h"

namespace {

int g_rank = 0;

[[noreturn]] void fail(const std::string &what)
{
  std::cerr << "test_cpp: rank " << g_rank << ": " << what << std::endl;
  std::_Exit(1);
}

void say(const std::string &what)
{
  if (g_rank == 0) {
    std::cout << "test_cpp: " << what << std::endl;
  }
}

void must(int rc, const std::string &call)
{
  if (rc != SCR_SUCCESS) {
    fail(call + " failed (" + std::to_string(rc) + ")");
  }
}

struct Options {
  long steps = 6, size = 10000, expect_restart = -1, die_at = -1, die_rank = 0;
};

Options parse(int argc, char **argv)
{
  Options o;
  const std::map<std::string, long *> known = {{"--steps", &o.steps},
                                               {"--size", &o.size},
                                               {"--expect-restart", &o.expect_restart},
                                               {"--die-at", &o.die_at},
                                               {"--die-rank", &o.die_rank}};
  for (int i = 1; i < argc; i += 2) {
    const auto entry = known.find(argv[i]);
    if (entry == known.end() || i + 1 >= argc) {
      fail(std::string("unknown option or no value: ") + argv[i]);
    }
    try {
      *entry->second = std::stol(argv[i + 1]);
    } catch (const std::exception &) {
      fail(std::string(argv[i]) + ": not a number: " + argv[i + 1]);
    }
  }
  return o;
}

std::string dataset_name(long step)
{
  std::string digits = std::to_string(step);
  return "cpp." + std::string(digits.size() < 6 ? 6 - digits.size() : 0, '0') + digits;
}

std::string route(const std::string &dataset)
{
  const char *prefix = std::getenv("SCR_PREFIX");
  const std::string base = prefix != nullptr ? std::string(prefix) + "/" : std::string();
  const std::string file = base + dataset + "/rank_" + std::to_string(g_rank) + ".bin";
  std::vector<char> path(SCR_MAX_FILENAME);
  must(SCR_Route_file(file.c_str(), path.data()), "SCR_Route_file(" + file + ")");
  return path.data();
}

std::vector<double> contents(long step, long size)
{
  std::vector<double> data(static_cast<std::size_t>(size));
  double value = static_cast<double>(1000 * step + g_rank);
  for (double &number : data) {
    number = value;
    value = value * 1.0000001 + 0.5;
  }
  return data;
}

std::streamsize bytes_of(const std::vector<double> &data)
{
  return static_cast<std::streamsize>(data.size() * sizeof(double));
}

bool save(const std::string &path, const std::vector<double> &data)
{
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char *>(data.data()), bytes_of(data));
  out.close();
  return !out.fail();
}

bool same_as(const std::string &path, const std::vector<double> &expected)
{
  std::ifstream in(path, std::ios::binary);
  std::vector<double> data(expected.size());
  in.read(reinterpret_cast<char *>(data.data()), bytes_of(data));
  return in && data == expected && in.peek() == std::ifstream::traits_type::eof();
}

void checkpoint(long step, long size)
{
  const std::string name = dataset_name(step);
  must(SCR_Start_output(name.c_str(), SCR_FLAG_CHECKPOINT), "SCR_Start_output");
  const bool good = save(route(name), contents(step, size));
  must(SCR_Complete_output(good ? 1 : 0), "SCR_Complete_output of " + name);
}

long restart(long size)
{
  int have = 0;
  std::vector<char> buffer(SCR_MAX_FILENAME);
  must(SCR_Have_restart(&have, buffer.data()), "SCR_Have_restart");
  if (have == 0) {
    return 0;
  }
  must(SCR_Start_restart(buffer.data()), "SCR_Start_restart");
  const std::string name = buffer.data();
  const long step = name.rfind("cpp.", 0) == 0 ? std::strtol(name.c_str() + 4, nullptr, 10) : 0;
  if (step <= 0 || dataset_name(step) != name) {
    fail("'" + name + "' is not a dataset of this test");
  }
  if (!same_as(route(name), contents(step, size))) {
    fail("dataset " + name + " is damaged");
  }
  must(SCR_Complete_restart(1), "SCR_Complete_restart");
  return step;
}

void work(const Options &o, long done)
{
  for (long step = done + 1; step <= o.steps; ++step) {
    if (done == 0 && step == o.die_at && g_rank == o.die_rank) {
      std::raise(SIGKILL);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    int need = 0, stop = 0;
    must(SCR_Need_checkpoint(&need), "SCR_Need_checkpoint");
    if (need != 0) {
      checkpoint(step, o.size);
      say("step " + std::to_string(step) + ": written");
    }
    must(SCR_Should_exit(&stop), "SCR_Should_exit");
    if (stop != 0) {
      say("asked to stop at step " + std::to_string(step));
      return;
    }
  }
}

} // namespace

int main(int argc, char **argv)
{
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &g_rank);
  const Options o = parse(argc, argv);
  must(SCR_Init(), "SCR_Init");
  const long done = restart(o.size);
  say((done > 0 ? "restart" : "start") + std::string(" from step ") + std::to_string(done));
  if (o.expect_restart >= 0 && o.expect_restart != done) {
    fail("expected a restart from step " + std::to_string(o.expect_restart));
  }
  work(o, done);
  must(SCR_Finalize(), "SCR_Finalize");
  say("finished");
  MPI_Finalize();
  return 0;
}
