// Messages and collectives as jobs of a stream, carried by a gloo group. gloo sends when the peer receives (rendezvous).
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "tensors.h"

namespace standin {
using Group = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

class Carrier {
 public:
  // stream: of what is put from now on
  Carrier(Group group, int device, int64_t stream) : group_(std::move(group)), stream_(streams().at(device, stream)) {}

  void send(const at::Tensor& tensor, int peer) {
    put({tensor}, [=, group = group_](Tensors& views) {
      if (message_delay()) usleep(message_delay());
      if (views[0].numel()) group->send(views, peer, 0)->wait();
    });
  }

  void receive(const at::Tensor& tensor, int peer) {
    put({tensor}, [=, group = group_](Tensors& views) {
      if (views[0].numel()) group->recv(views, peer, 0)->wait();
    });
  }

  // all at once, so that their order is no matter; a peer below 0: send to -1 - peer
  void batch(const Tensors& tensors, const std::vector<int>& peers) {
    put(tensors, [=, group = group_](Tensors& views) {
      if (message_delay()) usleep(message_delay());
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (size_t i = 0; i < views.size(); ++i) {
        Tensors one{views[i]};
        if (one[0].numel()) works.push_back(peers[i] < 0 ? group->send(one, -1 - peers[i], 0) : group->recv(one, peers[i], 0));
      }
      for (auto& work : works) work->wait();
    });
  }

  // average: sum, then divided by the size of the group
  void all_reduce(const at::Tensor& tensor, c10d::ReduceOp op, bool average) {
    put({tensor}, [=, group = group_](Tensors& views) { reduce(group, views, op, average); });
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, c10d::ReduceOp op, bool average) {
    put({output, input}, [=, group = group_](Tensors& views) {
      Tensors whole{views[1].clone()};
      reduce(group, whole, op, average);
      if (views[0].numel()) views[0].copy_(whole[0].view({group->getSize(), -1})[group->getRank()].view_as(views[0]));
    });
  }

  void broadcast(const at::Tensor& tensor, int root) {
    put({tensor}, [=, group = group_](Tensors& views) {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      if (views[0].numel()) group->broadcast(views, options)->wait();
    });
  }

  // parts: one a rank, of the shape of the input
  void all_gather(const Tensors& parts, const at::Tensor& input) {
    Tensors all(parts);
    all.push_back(input);
    put(all, [group = group_](Tensors& views) {
      Tensors inputs{views.back()};
      std::vector<Tensors> outputs{Tensors(views.begin(), views.end() - 1)};
      if (inputs[0].numel()) group->allgather(outputs, inputs)->wait();
    });
  }

  void gather(const Tensors& parts, const at::Tensor& input, int root) {
    Tensors all(parts);
    all.push_back(input);
    put(all, [=, group = group_](Tensors& views) {
      Tensors inputs{views.back()};
      std::vector<Tensors> outputs;
      if (views.size() > 1) outputs.push_back(Tensors(views.begin(), views.end() - 1));
      c10d::GatherOptions options;
      options.rootRank = root;
      group->gather(outputs, inputs, options)->wait();
    });
  }

  void barrier() {
    put({}, [group = group_](Tensors&) { group->barrier()->wait(); });
  }

 private:
  Group group_;
  Stream& stream_;

  void put(const Tensors& tensors, std::function<void(Tensors&)> act) {
    Tensors views;
    for (auto& tensor : tensors) views.push_back(kernel_view(tensor));
    stream_.put([views, act = std::move(act)]() mutable { act(views); }, true);
  }

  static void reduce(const Group& group, Tensors& tensors, c10d::ReduceOp op, bool average) {
    if (!tensors[0].numel()) return;
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    group->allreduce(tensors, options)->wait();
    if (average) tensors[0].div_(group->getSize());
  }
};
}  // namespace standin
