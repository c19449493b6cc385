"""Federated averaging in NumPy, written without tfdist: softmax regression by clients that train with plain SGD."""

import numpy as np


def softmax(logits):
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def gradients(weights, inputs, labels):
    kernel, bias = weights
    errors = softmax(inputs @ kernel + bias)
    errors[np.arange(len(labels)), labels] -= 1
    errors /= len(labels)
    return [inputs.T @ errors, errors.sum(axis=0)]


def loss(weights, inputs, labels):
    kernel, bias = weights
    return -np.log(softmax(inputs @ kernel + bias)[np.arange(len(labels)), labels]).mean()


def clipped(differences, limit):
    norm = np.sqrt(sum((one**2).sum() for one in differences))
    return [one * min(1.0, limit / norm) for one in differences]


class Adam:
    """Kingma and Ba 2015, as Keras computes it."""

    def __init__(self, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
        self.rate, self.betas, self.epsilon = rate, (beta_1, beta_2), epsilon
        self.step, self.moments = 0, None

    def apply(self, weights, found):
        if self.moments is None:
            self.moments = [np.zeros_like(one) for one in weights], [np.zeros_like(one) for one in weights]
        self.step += 1
        first, second = self.moments
        rate = self.rate * np.sqrt(1 - self.betas[1] ** self.step) / (1 - self.betas[0] ** self.step)
        for index, gradient in enumerate(found):
            first[index] += (gradient - first[index]) * (1 - self.betas[0])
            second[index] += (gradient**2 - second[index]) * (1 - self.betas[1])
        return [
            one - rate * first[index] / (np.sqrt(second[index]) + self.epsilon) for index, one in enumerate(weights)
        ]


class Sgd:
    def __init__(self, rate):
        self.rate = rate

    def apply(self, weights, found):
        return [one - self.rate * gradient for one, gradient in zip(weights, found, strict=True)]


def train(weights, batches_of, rounds, server, *, local_steps, rate, proximal=0.0, clip=None):
    """Returns the weights and the loss, by samples, of each round.

    Args:
      weights: kernel and bias.
      batches_of: by client, its batches, which it sees again and again in their order.
      rounds: for each round, the clients that take part.
      server: applies the mean difference.
      local_steps: of a client in a round.
      rate: of a client's SGD.
      proximal: the factor of FedProx's term.
      clip: the largest norm of a difference.
    """
    weights = [one.astype("float64") for one in weights]
    positions, losses = [0] * len(batches_of), []
    for clients in rounds:
        differences, counts, lost = [], [], 0.0
        for client in clients:
            own, samples = [one.copy() for one in weights], 0
            for _ in range(local_steps):
                inputs, labels = batches_of[client][positions[client] % len(batches_of[client])]
                positions[client] += 1
                lost += loss(own, inputs, labels) * len(labels)
                found = gradients(own, inputs, labels)
                own = [
                    one - rate * (gradient + proximal * (one - start))
                    for one, gradient, start in zip(own, found, weights, strict=True)
                ]
                samples += len(labels)
            difference = [start - one for start, one in zip(weights, own, strict=True)]
            differences.append(clipped(difference, clip) if clip else difference)
            counts.append(samples)
        total = sum(counts)
        mean = [
            sum(count / total * one[index] for count, one in zip(counts, differences, strict=True))
            for index in range(len(weights))
        ]
        weights = server.apply(weights, mean)
        losses.append(lost / total)
    return weights, losses
