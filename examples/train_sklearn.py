"""A pipeline of scikit-learn whose classifier trains on ranks: threads, or under mpirun."""

import mpishard as ms
from mpishard.sklearn import ShardedClassifier
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def network(features, classes, seed):
    """Any model of mpishard with a loss; samples come as rows of features."""
    return ms.nn.MLP([features, 64, classes], "gelu", seed=seed, loss=ms.nn.CrossEntropy())


def main():
    x, y = load_digits(return_X_y=True)
    # Under mpirun every rank runs this program, and must split alike: hence the random_state.
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0)
    pipeline = make_pipeline(
        StandardScaler(), ShardedClassifier(network, epochs=10, random_state=0)
    )
    search = GridSearchCV(pipeline, {"shardedclassifier__learning_rate": [1e-4, 1e-2]}, cv=2).fit(
        x_train, y_train
    )
    accuracy = search.score(x_test, y_test)

    def report(backend):  # of ranks, the first prints
        backend.print("best:", search.best_params_)
        backend.print("accuracy above 0.95:", accuracy > 0.95)

    ms.launch(report)


if __name__ == "__main__":
    main()
