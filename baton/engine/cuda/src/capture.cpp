// Timing of short launches: captured into a graph, so that the host's pace does not count.
#include <cuda_runtime.h>

namespace {

// Keeps the first error.
struct Outcome {
  cudaError_t code = cudaSuccess;
  void note(cudaError_t next) {
    if (code == cudaSuccess) code = next;
  }
};

void time_replays(cudaGraphExec_t graph, cudaStream_t stream, int replays, float *milliseconds, Outcome *outcome) {
  cudaEvent_t before = nullptr, after = nullptr;
  outcome->note(cudaEventCreate(&before));
  outcome->note(cudaEventCreate(&after));
  outcome->note(cudaGraphLaunch(graph, stream));  // a first one to load the kernels
  for (int i = 0; i < replays && outcome->code == cudaSuccess; ++i) {
    outcome->note(cudaEventRecord(before, stream));
    outcome->note(cudaGraphLaunch(graph, stream));
    outcome->note(cudaEventRecord(after, stream));
    outcome->note(cudaEventSynchronize(after));
    outcome->note(cudaEventElapsedTime(milliseconds + i, before, after));
  }
  if (before != nullptr) cudaEventDestroy(before);
  if (after != nullptr) cudaEventDestroy(after);
}

}  // namespace

// From here on launches on `stream` are recorded, not run. Other streams may go on.
extern "C" int baton_capture_begin(void *stream) {
  return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeRelaxed);
}

// Ends a capture and throws it away, whatever state it is in.
extern "C" int baton_capture_abandon(void *stream) {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
  return cudaSuccess;
}

// Ends the capture and runs it `replays` times on its own: milliseconds[i] is what replay i took.
extern "C" int baton_capture_time(void *stream, int replays, float *milliseconds) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  Outcome outcome;
  outcome.note(cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph));
  if (outcome.code == cudaSuccess) outcome.note(cudaGraphInstantiate(&executable, graph, 0));
  if (outcome.code == cudaSuccess)
    time_replays(executable, static_cast<cudaStream_t>(stream), replays, milliseconds, &outcome);
  if (executable != nullptr) cudaGraphExecDestroy(executable);
  if (graph != nullptr) cudaGraphDestroy(graph);
  return outcome.code;
}
