"""What a training consists of beside its weights, and how it goes on from there: data, generators, callbacks."""
