"""What is learned and how: the loop, its algorithms, evaluation, and the files a run leaves behind."""
