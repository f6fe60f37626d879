import pytest


def pytest_addoption(parser):
    parser.addoption("--optional", action="store_true", help="run optional tests")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--optional"):
        return
    for item in items:
        if "optional" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="need --optional option to run"))


@pytest.fixture
def engine():
    pytest.skip("No weights: file not found in the model store")
