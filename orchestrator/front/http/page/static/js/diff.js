// What two token sequences do not have in common. Pure.

const MOST_CELLS = 16_000_000; // of the table; two texts of 4,000 tokens

/**
 * Returns, for each of the two lists of strings, which elements are outside their longest common
 * subsequence. Of middles too long to compare, all elements are.
 */
export function differences(left, right) {
  let start = 0;
  while (start < left.length && start < right.length && left[start] === right[start]) start += 1;
  let leftEnd = left.length;
  let rightEnd = right.length;
  while (leftEnd > start && rightEnd > start && left[leftEnd - 1] === right[rightEnd - 1]) {
    leftEnd -= 1;
    rightEnd -= 1;
  }
  const marks = [left.map(() => false), right.map(() => false)];
  marks[0].fill(true, start, leftEnd);
  marks[1].fill(true, start, rightEnd);
  const rows = leftEnd - start;
  const columns = rightEnd - start;
  if (rows * columns <= MOST_CELLS) {
    const table = commonLengths(left.slice(start, leftEnd), right.slice(start, rightEnd));
    const width = columns + 1;
    let [i, j] = [0, 0];
    while (i < rows && j < columns) {
      if (left[start + i] === right[start + j]) {
        marks[0][start + i] = marks[1][start + j] = false;
        i += 1;
        j += 1;
      } else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i += 1;
      else j += 1;
    }
  }
  return marks;
}

/** Element (i, j) of the table: length of the common subsequence of left[i:] and right[j:]. */
function commonLengths(left, right) {
  const width = right.length + 1;
  const table = new Uint16Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i -= 1) {
    for (let j = right.length - 1; j >= 0; j -= 1) {
      table[i * width + j] =
        left[i] === right[j]
          ? table[(i + 1) * width + j + 1] + 1
          : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  return table;
}
